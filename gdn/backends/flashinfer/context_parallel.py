"""When extend splits one sequence over several CTAs, the library's `use_cp`.

Off. Its scratch is shared by all streams of a device, and it takes no slot arguments, without which a padded sequence
reads outside the pool. The library's own choice loses at 64 parallel states (sequences times value heads) and on rows
below about 3,000 tokens. `python -m benchmarks.tune_flashinfer_cp` finds the points where it would pay on a device; the
sweep is still to be run on an H200, and its result belongs here before this is ever True.
"""

from typing import Final

USE_CP: Final = False
