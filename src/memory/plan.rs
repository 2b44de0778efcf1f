//! The memory plan: all large allocations of an engine, known before they are made.

use crate::backend::{Alloc, Backend, InputLimits};
use crate::error::{Error, Result};
use crate::kv::Paging;
use crate::model::{BatchLimits, KvPool, ModelFiles, input_limits, work_bytes};
use crate::types::options::{Dtype, EngineOptions, KvDtype};

/// The large allocations of an engine, and the limits that follow from them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryPlan {
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// Activations, logits and working memory of the kernels. The small tables of sampler,
    /// scheduler and tokenizer are not included.
    pub work_bytes: u64,
    /// Size of the KV pool in blocks.
    pub blocks: usize,
    /// Maximum number of blocks to which the pool can grow.
    pub max_blocks: usize,
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of layer groups, which have KV blocks of their own.
    pub groups: usize,
    /// Bytes per block, for all layers of a group.
    pub block_bytes: u64,
    /// Type in which K and V are stored.
    pub kv_dtype: KvDtype,
    /// Maximum number of tokens of a sequence.
    pub max_model_len: usize,
    /// Number of sequences of `max_model_len` tokens that fit the pool at once.
    pub full_sequences: usize,
    /// Size of the host tier in bytes, in memory or in its file.
    pub swap_bytes: u64,
    /// Size of the host tier in blocks.
    pub swap_blocks: usize,
}

impl MemoryPlan {
    /// Computes the plan for a model on a backend.
    pub fn for_model<B: Backend>(files: &ModelFiles, backend: &B, options: &EngineOptions) -> Result<MemoryPlan> {
        let weight_bytes = files.weight_bytes(backend)?;
        let kv_dtype = options.kv_dtype.unwrap_or(if files.dtype == Dtype::F32 { KvDtype::F32 } else { KvDtype::Bf16 });
        let block_size = options.block_size;
        let block_bytes = files.kv_block_bytes(backend, KvPool { blocks: 1, block_size, dtype: kv_dtype });
        let max_len = model_max_len(options, files.spec.max_positions)?;
        let paging = paging(files, block_size);
        let inputs = backend.reserved_inputs_bytes(&inputs(files, options, &paging, max_len));
        let work_bytes = work_bytes(backend, files.part(), limits(options), options.thread_count(), files.place) + inputs;
        let share = device_share(options, backend, weight_bytes + work_bytes)?;
        let (blocks, max_blocks) = blocks(options, share, &paging, max_len, block_bytes);
        let plan = MemoryPlan {
            weight_bytes,
            kv_bytes: 0,
            work_bytes,
            blocks: 0,
            max_blocks: 0,
            block_size,
            groups: paging.groups(),
            block_bytes,
            kv_dtype,
            max_model_len: 0,
            full_sequences: 0,
            swap_bytes: 0,
            swap_blocks: 0,
        };
        plan.with_blocks(files, options, [blocks, max_blocks, swap_blocks(options, block_bytes)?])
    }

    /// Returns the plan with other numbers of blocks: of the pool, of the largest pool, and of the
    /// host tier.
    pub fn with_blocks(
        self,
        files: &ModelFiles,
        options: &EngineOptions,
        [blocks, max_blocks, swap_blocks]: [usize; 3],
    ) -> Result<MemoryPlan> {
        let (paging, block_bytes) = (paging(files, self.block_size), self.block_bytes);
        let max_len = model_max_len(options, files.spec.max_positions)?;
        let max_model_len = max_len_in_pool(options, &paging, max_len, blocks, block_bytes)?;
        Ok(MemoryPlan {
            kv_bytes: blocks as u64 * block_bytes,
            blocks,
            max_blocks,
            max_model_len,
            full_sequences: blocks / paging.max_blocks(max_model_len, options.rows_at_once()),
            swap_bytes: swap_blocks as u64 * block_bytes,
            swap_blocks,
            ..self
        })
    }
}

pub fn paging(files: &ModelFiles, block_size: usize) -> Paging {
    Paging::new(block_size, &files.windows())
}

pub fn limits(options: &EngineOptions) -> BatchLimits {
    BatchLimits { tokens: options.max_batch_tokens, logits: options.max_seqs }
}

/// Returns the size of the largest batch with sequences of up to `max_len` tokens.
pub fn inputs(files: &ModelFiles, options: &EngineOptions, paging: &Paging, max_len: usize) -> InputLimits {
    input_limits(files.part(), limits(options), paging.entries(max_len), paging.groups())
}

/// Returns the maximum length that the options and the model allow, without regard to the pool.
pub fn model_max_len(options: &EngineOptions, max_positions: usize) -> Result<usize> {
    match options.max_model_len {
        None => Ok(max_positions),
        Some(len) if (2..=max_positions).contains(&len) => Ok(len),
        Some(len) => {
            let range = format!("from 2 (a prompt token and an answer) to {max_positions}, for which the model was made");
            Err(Error::invalid(format!("max_model_len is {len}; must be {range}")))
        }
    }
}

/// Memory that the driver needs for code, lists and rounding, beyond the plan.
const DRIVER_BYTES: u64 = 256 << 20;

/// Returns the part of the device memory for the pool, if `memory_fraction` is set: a fraction of
/// what other allocations leave.
fn device_share<B: Alloc>(options: &EngineOptions, backend: &B, others: u64) -> Result<Option<u64>> {
    let (Some(fraction), Some(free)) = (options.memory_fraction, backend.free_bytes()?) else { return Ok(None) };
    let others = others.saturating_add(DRIVER_BYTES);
    let left = free.checked_sub(others).ok_or_else(|| {
        Error::capacity(format!(
            "no device memory is left for the KV pool ({others} bytes for the rest, {free} free); lower max_batch_tokens"
        ))
    })?;
    Ok(Some((left as f64 * f64::from(fraction)) as u64))
}

/// Returns the number of blocks of the pool, and its maximum.
fn blocks(options: &EngineOptions, share: Option<u64>, paging: &Paging, max_len: usize, block_bytes: u64) -> (usize, usize) {
    let all = (paging.max_blocks(max_len, options.rows_at_once()) * options.max_seqs) as u64;
    let own = options.kv_bytes.or(share).unwrap_or(EngineOptions::DEFAULT_KV_BYTES.min(all.saturating_mul(block_bytes)));
    let (now, max) = options.budget.as_ref().map_or((own, own), |budget| budget.available());
    // Slot numbers must fit 32 bits.
    let blocks = |bytes: u64| (bytes / block_bytes).min(u32::MAX as u64 / options.block_size as u64) as usize;
    (blocks(now), blocks(max))
}

/// More than any machine has memory for, and few enough for the tables of the host tier.
const MAX_SWAP_BLOCKS: u64 = 1 << 24;

fn swap_blocks(options: &EngineOptions, block_bytes: u64) -> Result<usize> {
    let (bytes, blocks) = (options.swap_bytes, options.swap_bytes / block_bytes);
    if bytes > 0 && blocks == 0 {
        return Err(Error::capacity(format!("swap_bytes is {bytes}; must be 0 or at least one block ({block_bytes} bytes)")));
    }
    if blocks > MAX_SWAP_BLOCKS {
        let max_bytes = MAX_SWAP_BLOCKS.saturating_mul(block_bytes);
        return Err(Error::capacity(format!("swap_bytes is {bytes} ({blocks} blocks of {block_bytes}); must be at most {max_bytes}")));
    }
    Ok(blocks as usize)
}

/// Returns the maximum length that the pool can hold. A sequence of this length must fit the pool
/// alone, so that no request starves.
fn max_len_in_pool(options: &EngineOptions, paging: &Paging, max_len: usize, blocks: usize, block_bytes: u64) -> Result<usize> {
    let holds = paging.max_len_in(blocks, max_len, options.rows_at_once());
    let too_small = |len: usize| {
        let needed = paging.max_blocks(len, options.rows_at_once()) as u64 * block_bytes;
        Error::capacity(format!(
            "the KV pool is too small for one sequence of max_model_len (the pool holds {holds} tokens of {len}); raise kv_bytes to {needed} or lower max_model_len"
        ))
    };
    match options.max_model_len {
        Some(len) if len > holds => Err(too_small(len)),
        None if holds < 2 => Err(too_small(2)),
        _ => Ok(holds),
    }
}
