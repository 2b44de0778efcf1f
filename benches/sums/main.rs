//! The cost of sums whose bits do not depend on the length of a message: those of the library,
//! which add in the order of the ranks, beside a ring, whose order depends on the part of the
//! message.
//!
//! usage: cargo bench --bench sums [-- RANKS]     default 2; the ranks are threads that share
//! memory

#[path = "../common.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use common::median;
use pagedllm::communicator::shared_memory::SharedMemory;
use pagedllm::communicator::{Communicator, OrderedSum};
use pagedllm::error::Result;

/// Numbers of a sum: a row of 2,048, and batches of 32 and 512 rows.
const LENGTHS: [usize; 3] = [2_048, 65_536, 1_048_576];
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
/// Rounds in which the ways take turns, and the time of each in a round.
const ROUNDS: usize = 15;
const ROUND: Duration = Duration::from_millis(30);

/// What a way keeps between its calls.
#[derive(Default)]
struct Scratch {
    sum: OrderedSum,
    received: Vec<f32>,
}

type Way = fn(&SharedMemory, &mut [f32], &mut Scratch) -> Result<()>;

const WAYS: [(&str, Way); 3] = [
    ("in order, all numbers on each rank", |group, x, scratch| group.all_reduce(x, &mut scratch.sum, TIMEOUT)),
    ("in order, a part on each rank", |group, x, scratch| scratch.sum.all_reduce(group, x, TIMEOUT)),
    ("ring", |group, x, scratch| ring(group, x, &mut scratch.received)),
];

/// Adds around a ring: each part begins on another rank, so its order differs.
fn ring(group: &SharedMemory, x: &mut [f32], received: &mut Vec<f32>) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let part = x.len() / size;
    received.resize(part, 0.0);
    for step in 0..2 * (size - 1) {
        let [sent, taken] = [0, 1].map(|back| (rank + 2 * size - step - back) % size * part);
        group.send(bytes(&mut x[sent..][..part]), next, TIMEOUT)?;
        group.receive(bytes(received), previous, TIMEOUT)?;
        let own = &mut x[taken..][..part];
        match step < size - 1 {
            true => own.iter_mut().zip(&*received).for_each(|(own, other)| *own += other),
            false => own.copy_from_slice(received),
        }
    }
    Ok(())
}

fn bytes(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: any bytes are numbers, and numbers have no padding.
    unsafe { numbers.align_to_mut::<u8>() }.1
}

/// Returns the microseconds of one sum on this rank.
fn time(group: &SharedMemory, way: Way, len: usize, barrier: &Barrier, scratch: &mut Scratch) -> Result<f64> {
    let mut x = vec![1.0; len];
    // All ranks make the same number of calls.
    let calls = (ROUND.as_nanos() / (20_000 + 2 * len as u128)).max(3) as u32;
    way(group, &mut x, scratch)?;
    barrier.wait();
    let began = Instant::now();
    (0..calls).try_for_each(|_| way(group, &mut x, scratch))?;
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}

/// Returns the times on this rank: `[length][way][round]`.
fn measure(path: &Path, rank: usize, size: usize, barrier: &Barrier) -> Result<Vec<Vec<Vec<f64>>>> {
    let group = SharedMemory::join(path, rank, size, TIMEOUT)?;
    let mut scratch = Scratch::default();
    let mut times = vec![vec![Vec::new(); WAYS.len()]; LENGTHS.len()];
    for (times, len) in times.iter_mut().zip(LENGTHS) {
        for _ in 0..ROUNDS {
            for (times, (_, way)) in times.iter_mut().zip(WAYS) {
                times.push(time(&group, way, len, barrier, &mut scratch)?);
            }
        }
    }
    Ok(times)
}

fn main() -> Result<()> {
    let size: usize = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(2);
    let path = PathBuf::from(format!("/dev/shm/pagedllm-sums-{}", std::process::id()));
    let barrier = Barrier::new(size);
    let times = thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|rank| (rank, &path, &barrier)).collect();
        let ranks: Vec<_> =
            ranks.into_iter().map(|(rank, path, barrier)| scope.spawn(move || measure(path, rank, size, barrier))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank has panicked")).next().expect("there is a rank")
    })?;
    println!("Sums over {size} ranks in shared memory, microseconds (medians), and the median of the ratios to a ring\n");
    println!("| Numbers | {} | {} | {} |\n| --- | --- | --- | --- |", WAYS[0].0, WAYS[1].0, WAYS[2].0);
    for (len, times) in LENGTHS.into_iter().zip(times) {
        let [all, parts, ring] = [0, 1, 2].map(|way| times[way].clone());
        let ratio = |ours: &[f64]| median(ours.iter().zip(&ring).map(|(ours, ring)| ours / ring).collect());
        println!(
            "| {len} | {:.1} ({:.2}) | {:.1} ({:.2}) | {:.1} |",
            median(all.clone()),
            ratio(&all),
            median(parts.clone()),
            ratio(&parts),
            median(ring.clone())
        );
    }
    Ok(())
}
