//! LLaMA models with random weights, written once. The bytes are always the same.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Map, json};

use crate::Result;

pub const VOCAB: usize = 32_000;
const STD: f32 = 0.02;
/// Size of the table of random numbers. Each draw uses 12 bits.
const TABLE: usize = 1 << 12;

pub struct Shape {
    pub name: &'static str,
    pub hidden: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Maximum length of a sequence.
    pub positions: usize,
}

pub const SHAPES: [Shape; 2] = [
    Shape { name: "S", hidden: 768, inner: 2048, layers: 12, heads: 12, kv_heads: 4, positions: 4096 },
    Shape { name: "M", hidden: 2048, inner: 5632, layers: 22, heads: 32, kv_heads: 4, positions: 4096 }, // TinyLlama-1.1B
];

impl Shape {
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    pub fn kv_width(&self) -> usize {
        self.head_dim() * self.kv_heads
    }

    /// Parameters of the layers that each token is multiplied by.
    pub fn body(&self) -> usize {
        let attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width();
        self.layers * (attention + 3 * self.hidden * self.inner)
    }

    pub fn head(&self) -> usize {
        VOCAB * self.hidden
    }

    /// Every tensor's name and shape, in the order of the file.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let Shape { hidden, inner, .. } = *self;
        let mut tensors = vec![("model.embed_tokens.weight".to_string(), vec![VOCAB, hidden])];
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
            add("input_layernorm", &[hidden]);
            add("self_attn.q_proj", &[hidden, hidden]);
            add("self_attn.k_proj", &[self.kv_width(), hidden]);
            add("self_attn.v_proj", &[self.kv_width(), hidden]);
            add("self_attn.o_proj", &[hidden, hidden]);
            add("post_attention_layernorm", &[hidden]);
            add("mlp.gate_proj", &[inner, hidden]);
            add("mlp.up_proj", &[inner, hidden]);
            add("mlp.down_proj", &[hidden, inner]);
        }
        tensors.push(("model.norm.weight".into(), vec![hidden]));
        tensors.push(("lm_head.weight".into(), vec![VOCAB, hidden]));
        tensors
    }

    fn config(&self) -> serde_json::Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": VOCAB,
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
        })
    }
}

/// Returns the file of the weights: that of a directory, or a GGUF file itself.
pub fn weights_file(model: &Path) -> PathBuf {
    if model.is_file() { model.into() } else { model.join("model.safetensors") }
}

/// The model's directory; makes it where the weights are missing or not of their full size.
pub fn make(shape: &Shape, parent: &Path) -> Result<PathBuf> {
    let dir = parent.join(shape.name);
    let tensors = shape.tensors();
    let (header, data_bytes) = header(&tensors)?;
    let file_bytes = header.len() as u64 + data_bytes;
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("config.json"), serde_json::to_string_pretty(&shape.config())?)?;
    if fs::metadata(weights_file(&dir)).is_ok_and(|file| file.len() == file_bytes) {
        return Ok(dir);
    }
    eprintln!("making model {} ({} MB) in {}", shape.name, file_bytes / 1_000_000, dir.display());
    // The file gets its name only when it is complete.
    let unfinished = dir.join("model.safetensors.unfinished");
    write_weights(&unfinished, &header, &tensors)?;
    fs::rename(unfinished, weights_file(&dir))?;
    Ok(dir)
}

/// Returns the safetensors header, preceded by its length, and the number of data bytes.
fn header(tensors: &[(String, Vec<usize>)]) -> Result<(Vec<u8>, u64)> {
    let mut entries = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>() as u64;
        entries.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut text = serde_json::to_vec(&entries)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok((header, end))
}

fn write_weights(path: &Path, header: &[u8], tensors: &[(String, Vec<usize>)]) -> Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut random = Random::new();
    out.write_all(header)?;
    for (_, shape) in tensors {
        let count = shape.iter().product();
        match shape.len() {
            1 => write_numbers(&mut out, count, || [bf16::ONE; 4])?, // norms
            _ => write_numbers(&mut out, count, || random.next4())?,
        }
    }
    Ok(out.flush()?)
}

fn write_numbers(out: &mut impl Write, count: usize, mut next4: impl FnMut() -> [bf16; 4]) -> Result<()> {
    let mut row = [0u8; 4096];
    let mut left = 2 * count; // a multiple of 8 for both shapes
    while left > 0 {
        let bytes = left.min(row.len());
        for eight in row[..bytes].chunks_exact_mut(8) {
            for (two, number) in eight.chunks_exact_mut(2).zip(next4()) {
                two.copy_from_slice(&number.to_le_bytes());
            }
        }
        out.write_all(&row[..bytes])?;
        left -= bytes;
    }
    Ok(())
}

/// Normally distributed numbers with standard deviation `STD`, four per draw.
struct Random {
    state: u64,
    table: Vec<bf16>, // [TABLE]
}

impl Random {
    fn new() -> Random {
        let mut random = Random { state: 1, table: Vec::new() };
        random.table = (0..TABLE).map(|_| bf16::from_f32(random.normal() * STD)).collect();
        random
    }

    /// Splitmix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The sum of twelve uniform numbers minus six has mean 0 and variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
    }

    fn next4(&mut self) -> [bf16; 4] {
        let bits = self.next() as usize;
        [0, 16, 32, 48].map(|shift| self.table[(bits >> shift) % TABLE])
    }
}
