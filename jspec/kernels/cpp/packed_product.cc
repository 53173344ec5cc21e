// The products of one format, which the compiler's command names: JSPEC_KIND. A model needs two or
// three formats of ten, and each takes seconds to compile.

#include "packed_product.h"

#define JSPEC_PRODUCTS_OF(kind) JSPEC_PACKED(kind)

JSPEC_PRODUCTS_OF(JSPEC_KIND);
