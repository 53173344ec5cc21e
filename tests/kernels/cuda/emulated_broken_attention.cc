// Attention without its barriers: a negative control.

#include "handlers.h"

#define __syncthreads() static_cast<void>(0)
#define LaunchAttention LaunchBrokenAttention
#define jspec_cuda_attention jspec_cuda_broken_attention
#include "attention.cu"

JSPEC_EMULATED(jspec_cuda_broken_attention)
