"""Side-by-side measurements of cuflash and its peers; see `python -m bench --help`."""

import os

# Threads of OpenBLAS and OpenMP spin after their work, for 20 ms and more, and would take the cores of whoever is
# measured next. The libraries read these when they are loaded.
for _name, _value in {"OPENBLAS_THREAD_TIMEOUT": "4", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}.items():
    os.environ.setdefault(_name, _value)
