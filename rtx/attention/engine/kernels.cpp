// All kernels for CPUs, compiled in one go by compiler.py.

#include "native.cpp"
#include "selection.cpp"
#include "probing.cpp"
