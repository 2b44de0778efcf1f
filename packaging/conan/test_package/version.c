#include <stdio.h>

#include <pagedllm.h>

int main(void) {
    printf("libpagedllm %s\n", pllm_version());
    return pllm_abi_version() != PLLM_ABI_VERSION;
}
