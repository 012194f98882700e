"""The tests. NumPy is imported after this, also in the processes that tests start: with a thread of OpenBLAS for each
core, which spins for a tenth of a second, the import would take almost twice the CPU time."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
