//! The CUDA backend: kernels of `kernels/` that are launched in order on one stream. A second
//! stream copies sampling parameters to the device and tokens back.
//!
//! Activations are f32, or, if only products read them, in the type that these multiply (`buffer`).
//! Matrices, K and V have their storage types. An op only queues its kernel;
//! errors are reported when a batch is uploaded and when results are read (`device`).

mod address;
mod alloc;
mod attention;
mod attention_kernels;
mod backlog;
mod blas;
mod blas_library;
mod buffer;
mod collectives;
mod connections;
mod context;
mod device;
mod device_context;
mod errors;
mod exactness;
mod families;
mod few_rows;
mod fp8;
mod function;
mod graphs;
mod host;
mod image;
mod inputs;
mod kernels;
mod kv;
mod kv_ops;
mod matrix;
mod memory;
mod moves;
mod nccl;
mod ops;
mod records;
mod routes;
mod sampler;
mod shared_library;
mod steps;
mod stored;
mod tables;
mod tensor_map;
mod uploads;
mod watchdog;

use std::sync::{Mutex, MutexGuard, PoisonError};

use attention::PartialResults;
use blas::Blas;
use buffer::Buf;
use collectives::Exchange;
use device::Device;
use host::Host;
use inputs::Inputs;
use kv::Kv;
use matrix::Matrix;
use memory::Address;
use moves::MoveList;
use routes::Routes;
use sampler::DeviceSampler;
use steps::Steps;
use tables::{Key, Tables};
use uploads::Uploads;

use super::{BackendTypes, HeadGroups, KvShape};
use crate::error::{Error, Result};

/// Products of at least this many rows use cuBLASLt.
const MIN_BLAS_ROWS: usize = 17;
/// Products of at most this many rows compute the norm of their rows. Each of their blocks reads all
/// rows and the weights of the norm in f32, beside 32 rows of the matrix. With 8 rows and a matrix in
/// bf16, or half as many and a matrix in bytes, L2 delivers 1.6 times as many bytes as the memory. An H100
/// has about this ratio of speeds.
const MAX_NORMED_ROWS: usize = 8;

/// Attention to prompts copies K and V token by token, as its earlier form has done on an H100. No GPU has
/// run copies of boxes: part prefill attention of `benches/gpu` compares both.
const COPIES_BOXES: bool = false;

pub struct CudaBackend {
    /// For products of many rows. The error says why own kernels compute them.
    blas: std::result::Result<Blas, String>,
    min_blas_rows: usize,
    max_normed_rows: usize,
    /// True if no operation stores its results as products round them.
    keeps_f32: bool,
    /// True if attention to prompts copies K and V by the tensor memory accelerator of Hopper.
    copies_boxes: bool,
    device: Device,
    /// Batch-invariant mode: results do not depend on the batch, so neither product algorithms nor
    /// splits of sequences vary.
    invariant: bool,
    /// The distinct divisions of heads of all layers.
    head_groups: Mutex<Vec<HeadGroups>>,
    /// Partial attention results of sequences in several parts, before they are merged.
    partial: Mutex<Option<PartialResults>>,
    tables: Tables,
    steps: Mutex<Steps>,
    moves: Mutex<MoveList>,
    /// None: no matrix is being loaded.
    uploads: Mutex<Option<Uploads>>,
    /// The other workers, if there are any.
    exchange: Option<Exchange>,
}

impl CudaBackend {
    /// Opens the device with this ordinal. `invariant`: a row has the same bits in every batch.
    pub fn new(ordinal: usize, invariant: bool) -> Result<CudaBackend> {
        CudaBackend::open(ordinal, invariant, false)
    }

    /// Opens the device of one of several workers, which `join` each other. It uses the primary
    /// context of the device.
    pub fn for_worker(ordinal: usize, invariant: bool) -> Result<CudaBackend> {
        CudaBackend::open(ordinal, invariant, true)
    }

    fn open(ordinal: usize, invariant: bool, primary: bool) -> Result<CudaBackend> {
        if image::is_missing() {
            return Err(Error::unsupported(format!(
                "device is cuda:{ordinal}, but this library was built without CUDA kernels; \
                 build it with nvcc (make cuda-toolkit installs one), or set device to \"cpu\""
            )));
        }
        let device = Device::open(ordinal, primary)?;
        if invariant {
            exactness::check(&device)?;
        }
        let moves = Mutex::new(MoveList::new(&device)?);
        Ok(CudaBackend {
            blas: if invariant { Err("PLLM_ENGINE_BATCH_INVARIANT is set".into()) } else { Blas::open(&device) },
            min_blas_rows: MIN_BLAS_ROWS,
            max_normed_rows: MAX_NORMED_ROWS,
            keeps_f32: false,
            copies_boxes: COPIES_BOXES,
            invariant,
            device,
            head_groups: Mutex::default(),
            partial: Mutex::default(),
            tables: Tables::default(),
            steps: Mutex::default(),
            moves,
            uploads: Mutex::default(),
            exchange: None,
        })
    }

    /// Sets the number of rows from which on products use cuBLASLt. Only benchmarks call it.
    pub fn use_blas_from(&mut self, rows: usize) {
        self.min_blas_rows = rows;
    }

    /// Sets the number of rows up to which products compute the norm of their rows. Only benchmarks and
    /// tests call it.
    pub fn norm_in_products_up_to(&mut self, rows: usize) {
        self.max_normed_rows = rows;
    }

    /// Selects tiles as for a device with this many multiprocessors. Only tests call it.
    pub fn assume_multiprocessors(&mut self, count: u32) {
        self.device.multiprocessors = count;
    }

    /// Stores all activations in f32. Only tests and benchmarks call it: results have the same bits.
    pub fn keep_f32(&mut self) {
        self.keeps_f32 = true;
    }

    /// Returns whether the device has a kernel that copies boxes of a KV pool of this shape.
    pub fn can_copy_boxes(&self, shape: &KvShape) -> bool {
        attention::can_copy_boxes(&self.device, shape)
    }

    /// Sets whether attention to prompts copies boxes of the KV pools that are created from now on. Only
    /// benchmarks and tests call it: results have the same bits.
    pub fn copy_boxes(&mut self, copies_boxes: bool) {
        self.copies_boxes = copies_boxes;
    }

    /// Describes what computes products of many rows.
    pub fn blas_library(&self) -> String {
        match &self.blas {
            Ok(blas) => blas.library().to_string(),
            Err(why) => format!("own kernels: {why}"),
        }
    }

    fn partial(&self) -> MutexGuard<'_, Option<PartialResults>> {
        self.partial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uploads(&self) -> MutexGuard<'_, Option<Uploads>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn head_groups(&self) -> MutexGuard<'_, Vec<HeadGroups>> {
        self.head_groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of a list. If it cannot be created, the next `check` reports the error,
    /// and nothing is launched before.
    fn list(&self, key: Key, numbers: impl Iterator<Item = u64> + Clone) -> Address {
        self.tables.get(&self.device, key, numbers).unwrap_or_else(|error| {
            self.device.refuse(error);
            Address::NULL
        })
    }
}

impl BackendTypes for CudaBackend {
    type Buf = Buf;
    type Matrix = Matrix;
    type Kv = Kv;
    type Inputs = Inputs;
    type Host = Host;
    type Routes = Routes;
    type Sampler = DeviceSampler;
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Queued work may still use the memory that is freed next.
        let _ = self.device.wait();
    }
}
