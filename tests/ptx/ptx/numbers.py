"""Arithmetic of PTX on arrays, where it differs from that of numpy, and conversions of formats."""
import numpy as np

U16, U32, U64, F32, F64 = np.uint16, np.uint32, np.uint64, np.float32, np.float64
MIN_NORMAL = np.finfo(F32).tiny


def flushed(x):
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F32(0), x), x)


def exp2_approx(x):
    return flushed(np.exp2(flushed(x).astype(F64)).astype(F32))


def reciprocal_approx(x):
    return flushed(F32(1) / flushed(x))


def fma(a, b, c):
    """a * b + c. The sum is rounded to f64 first, so one in 2^29 results may be the neighbour."""
    return (a.astype(F64) * b + c).astype(F32)


def fma_down(a, b, c):
    exact = a.astype(F64) * b + c
    rounded = exact.astype(F32)
    return np.where(rounded > exact, np.nextafter(rounded, F32(-np.inf)), rounded)


def rounded_to_odd(exact):
    """Rounds f64 to f32 such that rounding to fewer bits later gives what rounding once gives."""
    rounded = exact.astype(F32)
    inexact = (rounded != exact) & np.isfinite(exact)
    if not inexact.any():
        return rounded
    bits = rounded.view(U32)
    truncated = np.where(np.abs(rounded) > np.abs(exact), bits - U32(1), bits)
    return np.where(inexact, truncated | U32(1), bits).view(F32)


def to_bf16(x):
    """Rounds f32 to bf16, ties to even, as its bits."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits.astype(U64) + U64(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U64(16)
    return np.where(np.isnan(x), U16(0x7FFF), rounded.astype(U16))


def from_bf16(bits):
    return (np.asarray(bits, U16).astype(U32) << U32(16)).view(F32)


def to_f16(x):
    return np.asarray(x, F32).astype(np.float16).view(U16)


def pack(high, low):
    return low.astype(U32) | high.astype(U32) << U32(16)


def fma_bf16x2(a, b, c):
    halves = [[from_bf16((x >> U32(16 * half)).astype(U16)).astype(F64) for x in (a, b, c)] for half in (1, 0)]
    return pack(*[to_bf16(rounded_to_odd(x * y + z)) for x, y, z in halves])


def to_integer(x, dtype):
    """Converts a whole float to an integer. Others saturate, and NaN becomes 0."""
    limits = np.iinfo(dtype)
    inside = np.clip(np.nan_to_num(x.astype(F64), nan=0.0), float(limits.min), np.nextafter(float(limits.max) + 1, 0))
    return inside.astype(dtype)


def saturated(x):
    return np.where(np.isnan(x), F32(0), np.clip(x, F32(0), F32(1)))


def shift_left(x, by):
    bits = x.dtype.itemsize * 8
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def shift_right(x, by):
    bits = x.dtype.itemsize * 8
    return np.where(by < bits, x >> np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def multiply_high(a, b):
    """Returns the upper 64 bits of a product of two u64."""
    low, shift = U64(0xFFFFFFFF), U64(32)
    al, ah, bl, bh = a & low, a >> shift, b & low, b >> shift
    middle = ah * bl + (al * bl >> shift)
    return ah * bh + (middle >> shift) + ((al * bh + (middle & low)) >> shift)


def insert_bits(inserted, into, position, count):
    dtype = into.dtype.type
    mask = dtype(((1 << count) - 1) << position & (1 << into.dtype.itemsize * 8) - 1)
    return (into & ~mask) | (inserted << dtype(position) & mask)


def permute_bytes(a, b, selector):
    """Returns four bytes of a and b. Digit i of `selector` is the number of byte i: 0 to 3 in a, 4 to 7 in b."""
    both, result = a.astype(U64) | b.astype(U64) << U64(32), np.zeros_like(a)
    for i in range(4):
        result |= (both >> U64(8 * (selector >> 4 * i & 7)) & U64(255)).astype(a.dtype) << a.dtype.type(8 * i)
    return result


def divide(a, b):
    return np.where(b == 0, ~a.dtype.type(0), a // np.maximum(b, 1))


def remainder(a, b):
    return np.where(b == 0, a, a % np.maximum(b, 1))


def maximum(a, b):
    """The larger number, or the one that is not NaN. +0 is larger than -0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


# ---- E4M3, whose NaN the kernels decode to 480

def from_e4m3(codes):
    codes = np.asarray(codes).astype(np.int64)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0 ** -9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 0x80, -size, size)


SIZES = from_e4m3(np.arange(127))


def to_e4m3(x):
    """Rounds to the nearest number, ties to even codes."""
    sizes = np.minimum(np.abs(np.asarray(x, F64)), SIZES[-1])
    above = np.clip(np.searchsorted(SIZES, sizes), 1, 126)
    low, high = sizes - SIZES[above - 1], SIZES[above] - sizes
    codes = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
