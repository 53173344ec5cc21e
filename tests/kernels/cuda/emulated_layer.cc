// A whole layer in the emulator.

#include "handlers.h"

#include "layer.cu"

JSPEC_EMULATED(jspec_cuda_layer)
