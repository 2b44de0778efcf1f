// The header needs nothing before it.
#include "pagedllm.hpp"
