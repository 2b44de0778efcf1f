//! Attention over latents with the widths of DeepSeek-V3, for decode steps and for prompts.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{AttentionShape, Values};
use pagedllm::types::options::KvDtype;
use serde_json::json;

use crate::Result;
use crate::attention::{Sequences, time};
use crate::line::{Line, skipped};
use crate::options::Options;

const PART: &str = "latent attention";
/// Query heads of the model, and of one of eight ranks.
const HEADS: [usize; 2] = [128, 16];
const KEY_DIM: usize = 576;
const VALUE_DIM: usize = 512;
/// Width of a head before its queries are moved to the space of latents.
const HEAD_DIM: f32 = 192.0;

/// Sequences of equal length, and the rows of each that are computed.
#[derive(Clone, Copy)]
struct Step {
    sequences: usize,
    tokens: usize,
    rows: usize,
}

/// Measures microseconds. The limit is the longer of reading all latents once and computing.
pub fn bench(options: &Options) -> Result<()> {
    let decode = [1, 16, 64].into_iter().flat_map(|sequences| [4096, 32_768].map(|tokens| Step { sequences, tokens, rows: 1 }));
    let prompts = [(1024, 1024), (4096, 4096), (16_384, 2048)].map(|(tokens, rows)| Step { sequences: 1, tokens, rows });
    let all: Vec<Step> = decode.chain(prompts).collect();
    let small = [Step { sequences: 2, tokens: 300, rows: 1 }, Step { sequences: 1, tokens: 20, rows: 20 }];
    let backend = CudaBackend::new(0, false)?;
    for heads in HEADS {
        let layer = AttentionShape { values: Values::OfKeys(VALUE_DIM), ..AttentionShape::new(heads, 1, KEY_DIM, HEAD_DIM.sqrt().recip()) };
        for &step in options.sizes(&all, &small) {
            let Step { sequences: count, tokens, rows } = step;
            let sequences = Sequences::equal(count, tokens);
            let case = match rows {
                1 => format!("{heads} heads, batch {count}, context {tokens}"),
                rows if rows == tokens => format!("{heads} heads, {tokens} tokens"),
                rows => format!("{heads} heads, {rows} tokens after {}", tokens - rows),
            };
            let bytes = count * tokens * KvDtype::Bf16.head_bytes(KEY_DIM);
            let limit = 1e6 * options.ceilings.min_seconds(bytes as f64, sequences.flops(rows, &layer));
            let shape = json!({"heads": heads, "batch": count, "tokens": tokens, "rows": rows});
            match time(options, &backend, &layer, sequences, rows)? {
                Some(seconds) => Line { part: PART, case, shape, value: 1e6 * seconds, unit: "us", limit }.print(),
                None => skipped(PART, &case, "the device has too little memory"),
            }
        }
    }
    Ok(())
}
