"""Is a signed checkpoint still to be used? Its expiry, and newer ones of the same container (spec/signature.md, section 7).

All decisions, no input or output: `check` is given the time and the newest generation that the node knows
(`seen_generations`). A signature proves who made a checkpoint, never that it is the newest: this is the part that does.
Restore gates, `vgpu verify` and registry verification call it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from vgpu_errors import Expired, ImageError, OlderGeneration, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from image_format.trust.policy import Policy

TIME_FORM = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?Z")
_SPAN = re.compile(r"([1-9][0-9]{0,5})([hdwy])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1), "y": timedelta(days=365)}
# Clocks of two nodes differ by less; what claims to be made later than that was made by a clock that is wrong.
CLOCK_SKEW = timedelta(minutes=10)

ALLOW, WARN, REFUSE = "allow", "warn", "refuse"


@dataclass(frozen=True)
class SignedTimes:
    """What a signature says of time: whose checkpoint it is, the how manieth, when it was made, until when it counts."""

    container_id: str
    generation: int
    created: str
    expires: str | None = None


@dataclass(frozen=True)
class Warning:  # noqa: A001 - the word for it
    """Something to tell the user that refuses nothing."""

    what: str

    def __str__(self) -> str:
        return self.what


def check(
    signed: SignedTimes, *, now: datetime, last_generation: int | None, policy: Policy, where: str
) -> tuple[Warning, ...]:
    """Refuse what is too old, by expiry always and by generation where the policy says so; warn of the rest."""
    check_expiry(signed.expires, now=now, where=where)
    return (*_future(signed, now), *_older(signed, last_generation, policy, where))


def check_expiry(expires: str | None, *, now: datetime, where: str) -> None:
    """Refuse what has expired; what names no expiry never does."""
    if expires is not None and parse_time(expires, where=where) <= now:
        raise Expired(where=where, expires=expires)


def _future(signed: SignedTimes, now: datetime) -> Iterator[Warning]:
    if parse_time(signed.created, where="created") > now + CLOCK_SKEW:
        yield Warning(
            f"it says it was made at {signed.created}, which is in the future: this node's clock or its maker's is wrong"
        )


def _older(signed: SignedTimes, last_generation: int | None, policy: Policy, where: str) -> Iterator[Warning]:
    if last_generation is None or signed.generation >= last_generation or policy.older_generation == ALLOW:
        return
    if policy.older_generation == REFUSE:
        container = ascii(signed.container_id[:64])[1:-1]
        raise OlderGeneration(where=where, generation=signed.generation, container=container, newest=last_generation)
    yield Warning(f"it is generation {signed.generation}, and this node has seen generation {last_generation} of it")


def parse_time(text: str, *, where: str) -> datetime:
    """An RFC 3339 time in UTC; a fraction is cut to microseconds."""
    if not TIME_FORM.fullmatch(text):
        raise ImageError(where=where, what="a time must be RFC 3339 in UTC, ending in Z")
    whole, _, fraction = text.removesuffix("Z").partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")
    except ValueError as error:
        raise ImageError(where=where, what=f"{text} is no time") from error


def time_text(when: datetime) -> str:
    """The form that is written, in whole seconds."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def expiry_of(text: str, *, now: datetime) -> str:
    """What a user means by `90d`, `12h`, `4w`, `1y`, or a time itself; must lie in the future."""
    span = _SPAN.fullmatch(text)
    try:
        when = now + int(span[1]) * _UNITS[span[2]] if span else parse_time(text, where="--expires")
    except (ImageError, OverflowError) as error:
        remedy = "Give a span as 90d, 12h, 4w or 1y, or a time as 2027-01-31T00:00:00Z."
        raise UserError(what=f"{text!a} is no expiry", remedy=remedy) from error
    if when <= now:
        raise UserError(what=f"the expiry {text} lies in the past", remedy="Give a later one.")
    return time_text(when)
