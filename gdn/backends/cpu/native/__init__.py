"""Native kernels of the cpu backend: C++ with a plain C interface, compiled on first use and called through ctypes.

`build` finds a compiler and keeps what it makes in the user's cache; `library` loads it; the modules named after
operations hold factories; `src/` is the C++.
"""
