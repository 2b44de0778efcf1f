// A libcublasLt.so.12 for machines without a device: products as plain loops, queued on the streams of libcuda.so in the same folder.
// Matrices are column-major.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "shim.h"

#define API extern "C" __attribute__((visibility("default")))

extern "C" int shim_enqueue(void *stream, void (*function)(void *data), const void *data, size_t bytes);
extern "C" int shim_planned_failure(const char *api);
extern "C" int shim_device_capability();

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28 };
enum Epilogue { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum ScaleMode { SCALAR = 0, OUTER_VECTOR = 3 };
const int COMPUTE_F32 = 68;

struct Layout {
    int32_t type;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batch_count = 1;
    int64_t batch_stride = 0; // in elements
};

struct Description {
    int32_t transposed[2] = {0, 0}; // A, B
    int32_t epilogue = EPILOGUE_DEFAULT;
    const void *bias = nullptr; // [rows of D]
    int32_t bias_type = -1;     // -1: the type of D
    const float *scales[2] = {nullptr, nullptr}; // of A and B: one, or with OUTER_VECTOR [rows of D] and [columns of D]; null: 1
    int32_t scale_modes[2] = {SCALAR, SCALAR};
};

struct Preference {
    uint64_t workspace_bytes = 0;
};

struct Algorithm {
    uint64_t data[8];
};

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    int32_t state;
    float waves;
    int32_t reserved[4];
};

struct Product {
    Description description;
    float alpha, beta;
    const void *a, *b, *c;
    void *d;
    Layout a_layout, b_layout, c_layout, d_layout;
};

// ---- numbers and matrices

static float e4m3_of_byte(uint8_t byte) {
    int exponent = byte >> 3 & 15, fraction = byte & 7;
    float size = exponent ? ldexpf(float(8 + fraction), exponent - 10) : ldexpf(float(fraction), -9);
    return (byte & 0x7f) == 0x7f ? NAN : byte & 0x80 ? -size : size;
}

static float load(const void *from, int type, int64_t i) {
    if (type == F32) return static_cast<const float *>(from)[i];
    if (type == E4M3) return e4m3_of_byte(static_cast<const uint8_t *>(from)[i]);
    uint16_t bits = static_cast<const uint16_t *>(from)[i];
    return type == F16 ? shim::half_to_float(bits) : shim::float_of(uint32_t(bits) << 16);
}

static void store(void *to, int type, int64_t i, float x) {
    if (type == F32) static_cast<float *>(to)[i] = x;
    else static_cast<uint16_t *>(to)[i] = type == F16 ? shim::float_to_half(x) : shim::float_to_bf16(x);
}

static int64_t index_of(const Layout &layout, int batch, int64_t row, int64_t column) {
    return batch * layout.batch_stride + column * layout.ld + row;
}

// Returns [columns][rows] of the matrix or of its transpose.
static std::vector<float> read(const void *from, const Layout &layout, int batch, bool transposed) {
    std::vector<float> out;
    out.reserve(layout.rows * layout.columns);
    uint64_t rows = transposed ? layout.columns : layout.rows, columns = transposed ? layout.rows : layout.columns;
    for (uint64_t column = 0; column < columns; column++)
        for (uint64_t row = 0; row < rows; row++)
            out.push_back(load(from, layout.type, transposed ? index_of(layout, batch, column, row) : index_of(layout, batch, row, column)));
    return out;
}

static float scale_of(const Description &description, int operand, uint64_t i) {
    const float *scales = description.scales[operand];
    return scales ? scales[description.scale_modes[operand] == OUTER_VECTOR ? i : 0] : 1;
}

static void multiply_batch(const Product &p, int batch) {
    auto a = read(p.a, p.a_layout, batch, p.description.transposed[0]); // [k][m]
    auto b = read(p.b, p.b_layout, batch, p.description.transposed[1]); // [n][k]
    uint64_t m = p.d_layout.rows, n = p.d_layout.columns, k = m ? a.size() / m : 0;
    int bias_type = p.description.bias_type < 0 ? p.d_layout.type : p.description.bias_type;
    for (uint64_t column = 0; column < n; column++) {
        std::vector<float> sums(m);
        for (uint64_t i = 0; i < k; i++)
            for (uint64_t row = 0; row < m; row++) sums[row] += a[i * m + row] * b[column * k + i];
        for (uint64_t row = 0; row < m; row++) {
            float x = p.alpha * sums[row] * scale_of(p.description, 0, row) * scale_of(p.description, 1, column);
            if (p.beta != 0) x += p.beta * load(p.c, p.c_layout.type, index_of(p.c_layout, batch, row, column));
            if (p.description.epilogue == EPILOGUE_BIAS) x += load(p.description.bias, bias_type, row);
            store(p.d, p.d_layout.type, index_of(p.d_layout, batch, row, column), x);
        }
    }
}

static void multiply(void *data) {
    auto product = static_cast<const Product *>(data);
    for (int batch = 0; batch < product->d_layout.batch_count; batch++) multiply_batch(*product, batch);
}

static bool is_type(int type) { return type == F32 || type == F16 || type == BF16; }

// Checks the requirements of devices for products in fp8: A transposed, dimensions in multiples of 16, a bias in bf16. Only capability
// 9.0 supports scales per row.
static Status check_fp8(const Description &description, const Layout &a, const Layout &b, const Layout &d) {
    int capability = shim_device_capability();
    bool outer = description.scale_modes[0] == OUTER_VECTOR;
    if (capability < 89 || !description.transposed[0] || description.transposed[1] || a.type != E4M3 || b.type != E4M3) return NOT_SUPPORTED;
    if (a.rows % 16 || a.columns % 16 || a.ld % 16 || b.ld % 16 || d.ld % 4) return NOT_SUPPORTED;
    if (description.scale_modes[0] != description.scale_modes[1] || (outer && capability != 90)) return NOT_SUPPORTED;
    if (outer && !(description.scales[0] && description.scales[1])) return INVALID_VALUE;
    if (description.epilogue == EPILOGUE_BIAS && description.bias_type != BF16) return NOT_SUPPORTED;
    return d.type == F32 || d.type == BF16 || d.type == F16 ? SUCCESS : NOT_SUPPORTED;
}

static Status check(const Description &description, const Layout &a, const Layout &b, const Layout &c, const Layout &d) {
    uint64_t m = description.transposed[0] ? a.columns : a.rows, k = description.transposed[0] ? a.rows : a.columns;
    uint64_t b_rows = description.transposed[1] ? b.columns : b.rows, n = description.transposed[1] ? b.rows : b.columns;
    if (k != b_rows || m != d.rows || n != d.columns || c.rows != m || c.columns != n) return INVALID_VALUE;
    for (const Layout *layout : {&a, &b, &c, &d})
        if (layout->ld < int64_t(layout->rows) || layout->batch_count != d.batch_count) return INVALID_VALUE;
    if (a.type == E4M3 || b.type == E4M3) {
        Status status = check_fp8(description, a, b, d);
        if (status != SUCCESS) return status;
    } else {
        if (!is_type(a.type) || a.type != b.type || (d.type != F32 && d.type != a.type)) return NOT_SUPPORTED;
        if (description.scale_modes[0] != SCALAR || description.scale_modes[1] != SCALAR) return NOT_SUPPORTED;
    }
    if (c.type != d.type) return NOT_SUPPORTED;
    if (description.epilogue == EPILOGUE_BIAS) return description.bias ? SUCCESS : INVALID_VALUE;
    return description.epilogue == EPILOGUE_DEFAULT ? SUCCESS : NOT_SUPPORTED;
}

// ---- the API

template <class Body> int call(const char *api, Body body) {
    int planned = shim_planned_failure(api);
    return planned ? planned : body();
}

template <class T> int create(const char *api, void **out, T value) {
    return call(api, [&] {
        *out = new T(value);
        return SUCCESS;
    });
}

template <class T> int destroy(const char *api, void *handle) {
    return call(api, [&] {
        delete static_cast<T *>(handle);
        return SUCCESS;
    });
}

// Sets a field. The size must match.
template <class T> Status set(T &field, const void *from, size_t bytes) {
    if (bytes != sizeof(T)) return INVALID_VALUE;
    memcpy(&field, from, bytes);
    return SUCCESS;
}

struct Handle {};

API size_t cublasLtGetVersion() { return 120901; }

API int cublasLtCreate(void **out) { return create(__func__, out, Handle{}); }
API int cublasLtDestroy(void *handle) { return destroy<Handle>(__func__, handle); }

API int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    return create(__func__, out, Layout{type, rows, columns, ld});
}
API int cublasLtMatrixLayoutDestroy(void *layout) { return destroy<Layout>(__func__, layout); }

API int cublasLtMatrixLayoutSetAttribute(void *handle, int attribute, const void *from, size_t bytes) {
    return call(__func__, [&] {
        auto layout = static_cast<Layout *>(handle);
        switch (attribute) {
        case 0: return set(layout->type, from, bytes);
        case 2: return set(layout->rows, from, bytes);
        case 3: return set(layout->columns, from, bytes);
        case 4: return set(layout->ld, from, bytes);
        case 5: return set(layout->batch_count, from, bytes);
        case 6: return set(layout->batch_stride, from, bytes);
        default: return NOT_SUPPORTED;
        }
    });
}

API int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    if (compute != COMPUTE_F32 || scale != F32) return NOT_SUPPORTED;
    return create(__func__, out, Description{});
}
API int cublasLtMatmulDescDestroy(void *description) { return destroy<Description>(__func__, description); }

API int cublasLtMatmulDescSetAttribute(void *handle, int attribute, const void *from, size_t bytes) {
    return call(__func__, [&] {
        auto description = static_cast<Description *>(handle);
        switch (attribute) {
        case 3: return set(description->transposed[0], from, bytes);
        case 4: return set(description->transposed[1], from, bytes);
        case 7: return set(description->epilogue, from, bytes);
        case 8: return set(description->bias, from, bytes);
        case 17: return set(description->scales[0], from, bytes);
        case 18: return set(description->scales[1], from, bytes);
        case 26: return set(description->bias_type, from, bytes);
        case 31: return set(description->scale_modes[0], from, bytes);
        case 32: return set(description->scale_modes[1], from, bytes);
        default: return NOT_SUPPORTED;
        }
    });
}

API int cublasLtMatmulPreferenceCreate(void **out) { return create(__func__, out, Preference{}); }
API int cublasLtMatmulPreferenceDestroy(void *preference) { return destroy<Preference>(__func__, preference); }

// Only the size of the field is checked.
API int cublasLtMatmulPreferenceSetAttribute(void *handle, int attribute, const void *from, size_t bytes) {
    return call(__func__, [&] {
        return attribute == 1 ? set(static_cast<Preference *>(handle)->workspace_bytes, from, bytes) : NOT_SUPPORTED;
    });
}

API int cublasLtMatmulAlgoGetHeuristic(void *, const Description *description, const Layout *a, const Layout *b, const Layout *c,
                                       const Layout *d, void *, int max_results, HeuristicResult *results, int *count) {
    return call(__func__, [&] {
        Status status = max_results > 0 ? check(*description, *a, *b, *c, *d) : INVALID_VALUE;
        *count = status == SUCCESS;
        if (status == SUCCESS) results[0] = HeuristicResult();
        return status;
    });
}

API int cublasLtMatmul(void *, const Description *description, const float *alpha, const void *a, const Layout *a_layout, const void *b,
                       const Layout *b_layout, const float *beta, const void *c, const Layout *c_layout, void *d, const Layout *d_layout,
                       const Algorithm *, void *, size_t, void *stream) {
    return call(__func__, [&] {
        Status status = check(*description, *a_layout, *b_layout, *c_layout, *d_layout);
        if (status != SUCCESS) return status;
        Product product = {*description, *alpha, *beta, a, b, c, d, *a_layout, *b_layout, *c_layout, *d_layout};
        return shim_enqueue(stream, multiply, &product, sizeof(product)) ? EXECUTION_FAILED : SUCCESS;
    });
}
