// The products of one format, which the compiler's command names: JSPEC_KIND. A model needs two or
// three formats of ten, and each takes seconds to compile.

#include "packed_product.h"

#define JSPEC_PRODUCTS_OF(kind) JSPEC_PACKED(kind)

JSPEC_PRODUCTS_OF(JSPEC_KIND);

// Has it use the threads of another library, before it computes anything.
extern "C" void jspec_take_team(void* team) {
  Team::Shared() = static_cast<Team*>(team);
}
