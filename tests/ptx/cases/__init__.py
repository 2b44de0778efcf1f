"""The cases, by the file of their kernels."""
from . import cache, draw, elementwise, exactness, experts, few_rows, hopper, latent, norm, plain, products, records, tensor

MODULES = (products, records, few_rows, experts, elementwise, exactness, norm, cache, draw, plain, tensor, latent, hopper)


def all_cases():
    return [case for module in MODULES for case in module.cases()]
