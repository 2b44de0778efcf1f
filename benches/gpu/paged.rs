//! Attention of a decode step that reads K and V through a block table, compared with contiguous K and
//! V: section 7.1 of the PagedAttention paper. Contiguous K and V are one block for each sequence.

use pagedllm::backend::cuda::CudaBackend;
use serde_json::json;

use crate::Result;
use crate::attention::{Sequences, attention_shape, time};
use crate::line::{Line, peer, skipped};
use crate::options::Options;

const PART: &str = "paged attention";
/// Heads and KV heads of OPT-13B, the model of the paper, and of LLaMA-3-8B.
const HEADS: [(usize, usize); 2] = [(40, 40), (32, 8)];
/// Batches of the paper.
const BATCHES: [usize; 2] = [8, 32];
/// Contexts of the paper, and longer ones. All are powers of two, as every block size.
const CONTEXTS: [usize; 6] = [64, 128, 256, 1024, 4096, 16_384];
const BLOCK_SIZES: [usize; 6] = [8, 16, 32, 64, 128, 256];
/// More tokens per batch would take most of the time to fill.
const MAX_TOKENS: usize = 8 * 16_384;

pub fn bench(options: &Options) -> Result<()> {
    let backend = CudaBackend::new(0, false)?;
    for (heads, kv_heads) in HEADS {
        for &batch in options.sizes(&BATCHES, &[3]) {
            let contexts = options.sizes(&CONTEXTS, &[64]).iter().filter(|&context| batch * context <= MAX_TOKENS);
            contexts.into_iter().try_for_each(|&context| sizes(options, &backend, (heads, kv_heads), batch, context))?;
        }
    }
    Ok(())
}

/// Measures contiguous K and V, then every block size.
fn sizes(options: &Options, backend: &CudaBackend, (heads, kv_heads): (usize, usize), batch: usize, context: usize) -> Result<()> {
    let layer = attention_shape(heads, kv_heads);
    let sequences = Sequences::equal(batch, context);
    let limit = 1e6 * options.ceilings.min_seconds(sequences.bytes(kv_heads) as f64, 0.0);
    let case = |what: String| format!("{heads}/{kv_heads} heads, batch {batch}, context {context}, {what}");
    let shape =
        |block_size: usize| json!({"heads": heads, "kv_heads": kv_heads, "batch": batch, "context": context, "block_size": block_size});
    let Some(contiguous) = time(options, backend, &layer, sequences.in_blocks_of(context), 1)? else {
        skipped(PART, &case("all".into()), "the device has too little memory");
        return Ok(());
    };
    Line { part: PART, case: case("contiguous".into()), shape: shape(context), value: 1e6 * contiguous, unit: "us", limit }.print();
    for block_size in BLOCK_SIZES.into_iter().filter(|&size| size < context) {
        if let Some(paged) = time(options, backend, &layer, sequences.in_blocks_of(block_size), 1)? {
            peer(PART, &shape(block_size), 1e6 * contiguous, "us", "contiguous");
            let case = case(format!("blocks of {block_size}"));
            Line { part: PART, case, shape: shape(block_size), value: 1e6 * paged, unit: "us", limit }.print();
        }
    }
    Ok(())
}
