//! The formats of numbers in files and in memory.

use serde::{Deserialize, Serialize};

/// The type in which a model file stores weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Returns the bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Calls `visit` with the index and the value of each little-endian number in `bytes`.
    pub fn visit(self, bytes: &[u8], mut visit: impl FnMut(usize, f32)) {
        match self {
            Dtype::F32 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, f32::from_le_bytes(*b))),
            Dtype::F16 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, half::f16::from_le_bytes(*b).to_f32())),
            Dtype::Bf16 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, half::bf16::from_le_bytes(*b).to_f32())),
        }
    }

    /// Returns the name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// The type in which weights are kept in memory. On the CPU, integer weights are multiplied by
/// activations that are quantized to -127..127 at run time. On CUDA devices activations are in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightFormat {
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// OCP E4M3, an 8-bit float, with a scale per output. Only for CUDA devices.
    Fp8,
    /// -127 to 127, with a scale per output.
    Int8,
    /// 4-bit integers, with a scale per group of inputs of an output. With `offsets`, each group also
    /// has an offset, and both numbers are fitted to its weights.
    Int4 {
        /// Number of weights that share a scale.
        group: usize,
        /// Whether each group has an offset.
        offsets: bool,
    },
}

impl WeightFormat {
    /// The allowed group sizes of int4.
    pub const GROUPS: [usize; 3] = [32, 64, 128];

    /// Returns all formats that the CPU supports, with int4 in groups of `group`.
    pub fn all(group: usize) -> [WeightFormat; 6] {
        let int4 = |offsets| WeightFormat::Int4 { group, offsets };
        [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Int8, int4(false), int4(true)]
    }

    /// Returns whether the weights are integers.
    pub fn is_whole(self) -> bool {
        matches!(self, WeightFormat::Int8 | WeightFormat::Int4 { .. })
    }

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::F32 => "f32",
            WeightFormat::F16 => "f16",
            WeightFormat::Bf16 => "bf16",
            WeightFormat::Fp8 => "fp8",
            WeightFormat::Int8 => "int8",
            WeightFormat::Int4 { offsets: false, .. } => "int4",
            WeightFormat::Int4 { offsets: true, .. } => "int4_asymmetric",
        }
    }
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> WeightFormat {
        match dtype {
            Dtype::F32 => WeightFormat::F32,
            Dtype::F16 => WeightFormat::F16,
            Dtype::Bf16 => WeightFormat::Bf16,
        }
    }
}

/// The type in which K and V are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvDtype {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// -127 to 127, with one f32 scale per head and token.
    Int8,
    /// Values beyond 65504 are clamped.
    F16,
    /// E4M3, an 8-bit float up to 448, with scales as for `Int8`.
    Fp8,
}

impl KvDtype {
    /// All types.
    pub const ALL: [KvDtype; 5] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8, KvDtype::F16, KvDtype::Fp8];

    /// Returns the bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 | KvDtype::F16 => 2,
            KvDtype::Int8 | KvDtype::Fp8 => 1,
        }
    }

    /// Returns the bytes of the scale of one head of one token.
    pub fn scale_bytes(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::Bf16 | KvDtype::F16 => 0,
            KvDtype::Int8 | KvDtype::Fp8 => size_of::<f32>(),
        }
    }

    /// Returns the bytes of K, or of V, of one head of one token.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + self.scale_bytes()
    }

    /// Returns the name of the type.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
            KvDtype::F16 => "f16",
            KvDtype::Fp8 => "fp8",
        }
    }
}
