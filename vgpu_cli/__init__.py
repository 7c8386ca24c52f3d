"""The user's command line: one module per verb, one output form for people and one for programs.

Top of the layers: it may import every other package, and none of them imports it.
"""

VERSION = "0.1.0"
