"""What NVML says of the connections between this machine's GPUs agrees with the driver itself."""

from itertools import combinations

import pytest

from gpu_state.nvml import Nvml
from gpu_state.nvml_links import links


@pytest.mark.gpu
def test_pairs_that_reach_each_other_are_those_of_the_driver():
    import cuda.bindings.driver as cuda

    assert int(cuda.cuInit(0)[0]) == 0
    count = int(cuda.cuDeviceGetCount()[1])
    if count < 2:
        pytest.skip("one GPU has no pair")
    uuids = {n: _uuid(cuda.cuDeviceGetUuid(n)[1].bytes) for n in range(count)}
    told = {frozenset((link.a, link.b)): link for link in links(Nvml.load())}
    for n, m in combinations(range(count), 2):
        link = told[frozenset((uuids[n], uuids[m]))]
        can = [bool(int(cuda.cuDeviceCanAccessPeer(*pair)[1])) for pair in ((n, m), (m, n))]
        assert link.reaches == all(can), link
        assert link.nvlinks is not None, link
        assert link.way is not None, link
        print(link)


def _uuid(raw):
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
