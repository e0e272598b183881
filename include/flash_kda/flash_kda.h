// Everything.
#pragma once

#include "flash_kda/error.h"    // IWYU pragma: export
#include "flash_kda/forward.h"  // IWYU pragma: export
#include "flash_kda/tensor.h"   // IWYU pragma: export
#include "flash_kda/version.h"  // IWYU pragma: export
