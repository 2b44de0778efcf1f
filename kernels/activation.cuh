// Activations and gates.
#pragma once
#include "common.cuh"

enum Act { RELU, SILU, GELU, GELU_TANH, CLAMPED };

__device__ __forceinline__ float activated(u32 act, float x) {
    switch (act) {
    case RELU: return x < 0.0f ? 0.0f : x; // propagates NaN
    case SILU: return x / (1.0f + expf(-x));
    case GELU: return x * 0.5f * (1.0f + erff(x * 0.70710678f));
    default: return x / (1.0f + expf(-1.595769f * (x + 0.044715f * x * x * x))); // x * (1 + tanh(u)) / 2 = x / (1 + e^(-2u))
    }
}

// A gated activation: act(gate) * up, or, with CLAMPED, gate * sigmoid(alpha * gate) * (up + 1) with
// `gate` clamped to at most `limit` and `up` to [-limit, limit].
struct Glu {
    u32 act;
    float alpha, limit; // of CLAMPED
};

__device__ __forceinline__ float gated(Glu by, float gate, float up) {
    if (by.act != CLAMPED) return activated(by.act, gate) * up;
    gate = gate > by.limit ? by.limit : gate; // propagates NaN
    up = up > by.limit ? by.limit : up < -by.limit ? -by.limit : up;
    return gate / (1.0f + expf(-by.alpha * gate)) * (up + 1.0f);
}
