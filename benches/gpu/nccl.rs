//! A communicator of one rank, which a machine with one device can create: the library's own calls of
//! NCCL, without a second device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, BackendTypes, Collectives, Ops, Workers};
use pagedllm::communicator::Communicator;
use pagedllm::communicator::local::Local;
use pagedllm::error::{self, Code};
use pagedllm::types::options::WeightFormat;

use crate::Result;
use crate::line::{skipped, verdict};
use crate::options::Options;
use crate::products::matrix;
use crate::random::{Weights, numbers};

const PART: &str = "nccl";
/// Limit of waits, unless the limit itself is tested.
const PATIENT: Duration = Duration::from_secs(60);
/// Limit of the wait that the watchdog ends.
const SHORT: Duration = Duration::from_millis(100);
/// Seconds of the work that exceeds the short limit.
const OVERDUE: f64 = 0.6;
/// Fewer launches than the backend queues before it waits.
const MAX_LAUNCHES: usize = 400;
/// Rows, outputs and inputs of a product of that work.
const PRODUCT: [usize; 3] = [4096, 14_336, 4096];
const SMALL_PRODUCT: [usize; 3] = [8, 96, 200];

type Buf = <CudaBackend as BackendTypes>::Buf;

pub fn check(options: &Options) -> Result<()> {
    let backend = match join(PATIENT) {
        Err(error) if error.code() == Code::Unsupported => {
            skipped(PART, "a communicator of one rank", error.message());
            return Ok(());
        }
        created => created,
    };
    verdict(PART, "a communicator of one rank is created", backend.as_ref().map(drop).map_err(|e| e.to_string().into()));
    let backend = backend?;
    verdict(PART, "a message of a rank to itself has the same bits", message(&backend));
    verdict(PART, "sums and gathers of one rank keep the numbers", collectives(&backend));
    drop(backend);
    verdict(PART, "another communicator is created after the first one was freed", again());
    verdict(PART, "the watchdog ends the communicator if a wait takes too long", overdue(options));
    Ok(())
}

/// Opens device 0 as the only worker.
fn join(timeout: Duration) -> error::Result<CudaBackend> {
    let world: Arc<dyn Communicator> = Arc::new(Local::group(1).remove(0));
    let mut backend = CudaBackend::for_worker(0, false)?;
    backend.join(Workers { tensor: world.clone(), world, timeout })?;
    Ok(backend)
}

fn message(backend: &CudaBackend) -> Result<()> {
    for len in [1, 1000, 5_000_003] {
        let sent = numbers(len);
        let mut received = backend.vector(&vec![f32::NAN; len])?;
        backend.exchange_with_itself(len, &backend.vector(&sent)?, &mut received);
        equal(backend, &mut received, &sent)?;
    }
    Ok(())
}

fn collectives(backend: &CudaBackend) -> Result<()> {
    let sent = numbers(1000);
    let (mut x, mut gathered) = (backend.vector(&sent)?, backend.vector(&vec![f32::NAN; sent.len()])?);
    backend.reserve_exchange(sent.len())?;
    backend.all_reduce(sent.len(), &mut x);
    backend.all_gather(sent.len(), &x, &mut gathered);
    equal(backend, &mut x, &sent)?;
    equal(backend, &mut gathered, &sent)
}

fn again() -> Result<()> {
    message(&join(PATIENT)?)
}

fn equal(backend: &CudaBackend, found: &mut Buf, expected: &[f32]) -> Result<()> {
    match backend.read(found, expected.len())? == expected {
        true => Ok(()),
        false => Err(format!("{} numbers differ from those that were sent", expected.len()).into()),
    }
}

/// Queues more work than the limit allows, and waits for it.
fn overdue(options: &Options) -> Result<()> {
    let backend = join(SHORT)?;
    let [rows, outs, cols] = if options.small { SMALL_PRODUCT } else { PRODUCT };
    backend.reserve_rows(rows, cols)?;
    let matrix = matrix(&backend, &Weights::new(), WeightFormat::Bf16, outs, cols)?;
    let (x, mut out) = (backend.vector(&numbers(rows * cols))?, backend.buffer(rows * outs)?);
    let mut multiply = |times: usize| {
        let start = Instant::now();
        (0..times).for_each(|_| backend.matmul(rows, &x, &matrix, None, &mut out));
        backend.read(&mut out, 1).map(|_| start.elapsed().as_secs_f64())
    };
    multiply(1)?; // does all one-time work
    let times = (OVERDUE / multiply(1)?).ceil().min(MAX_LAUNCHES as f64) as usize;
    match multiply(times) {
        Err(error) if error.message().contains("has not responded") => Ok(()),
        Err(error) => Err(format!("the wait ended with a different error: {error}").into()),
        Ok(seconds) => Err(format!("a wait of {seconds:.2} s with a limit of {SHORT:?} was not ended").into()),
    }
}
