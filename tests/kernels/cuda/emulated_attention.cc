// Attention in the emulator.

#include "handlers.h"

#include "attention.cu"

JSPEC_EMULATED(jspec_cuda_attention)
