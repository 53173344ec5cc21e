// Attention and a whole layer in the emulator.

#include "handlers.h"

#include "attention.cu"
#include "layer.cu"

JSPEC_EMULATED(jspec_cuda_attention)
JSPEC_EMULATED(jspec_cuda_layer)
