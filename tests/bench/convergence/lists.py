"""The lists that the lab's command runs."""

from tests.bench.convergence.gates import GATES
from tests.bench.convergence.small import SMALL, key_small

LISTS = {"gates": GATES, "small": SMALL, "quick": (key_small((1,)),)}
