// The header compiles without another header before it.
#include "pagedllm.hpp"
