//! The group of workers, and what they agree on before the first step.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Workers;
use crate::communicator::Communicator;
use crate::error::{Error, Result, try_vec};
use crate::sys::bytes::{as_bytes, as_bytes_mut};
use crate::types::parallel::{Division, WorkerPlace};

/// The workers of one engine, as one of them sees them.
#[derive(Clone)]
pub struct Group {
    /// The communicators of this worker.
    pub workers: Workers,
    /// The place of this worker.
    pub place: WorkerPlace,
}

/// Bytes of the text with the version.
const VERSION_BYTES: usize = 128;
/// Maximum size of a group, which bounds what a wrong size allocates.
const MAX_RANKS: usize = 1 << 16;

impl Group {
    /// Creates the group and checks that all workers have the same library and the same division.
    pub fn new(world: Arc<dyn Communicator>, division: Division, timeout: Duration) -> Result<Group> {
        let (rank, size) = (world.rank(), world.size());
        if rank >= size {
            return Err(Error::invalid(format!("the communicator has rank {rank} of {size}; ranks are numbered from 0")));
        }
        if size > MAX_RANKS {
            return Err(Error::invalid(format!("the communicator has {size} ranks; must be at most {MAX_RANKS}")));
        }
        // All ranks exchange this before any of them can fail, so that none of them waits in vain.
        compare_versions(&*world, division, timeout)?;
        if size != division.workers() {
            return Err(Error::invalid(format!(
                "tensor_parallel {} times pipeline_parallel {} is {}, but the communicator has {size} ranks; give them the same number",
                division.tensor,
                division.pipeline,
                division.workers()
            )));
        }
        let workers = Workers { tensor: world.clone(), world, timeout };
        let mut group = Group { workers, place: division.place(rank) };
        if division.pipeline > 1 && division.tensor > 1 {
            group.agree(group.world().check_split())?;
            group.workers.tensor = group.world().split(group.place.stage, Some(timeout))?;
            group.agree(group.check_stage())?;
        }
        Ok(group)
    }

    /// Checks the result of the host's `split`, since another order of the ranks would give wrong
    /// sums.
    fn check_stage(&self) -> Result<()> {
        let WorkerPlace { division, tensor_rank, .. } = self.place;
        let (rank, size) = (self.workers.tensor.rank(), self.workers.tensor.size());
        match (rank, size) == (tensor_rank, division.tensor) {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "split of the communicator has returned rank {rank} of {size}; must be rank {tensor_rank} of {}",
                division.tensor
            ))),
        }
    }

    /// Returns the communicator of all workers.
    pub fn world(&self) -> &dyn Communicator {
        &*self.workers.world
    }

    /// Returns the limit of a wait for other workers.
    pub fn timeout(&self) -> Option<Duration> {
        Some(self.workers.timeout)
    }

    /// Returns the bytes of each worker, which may differ in length.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.workers.gather(bytes)
    }

    /// Returns the result of this worker if no worker has failed. Otherwise all workers fail.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        self.workers.agree(result)
    }

    /// Fails on all workers if their settings differ. `settings` has a line for each, with the name
    /// first.
    pub fn compare(&self, settings: &str) -> Result<()> {
        let all = self.gather(settings.as_bytes())?;
        let first = String::from_utf8_lossy(&all[0]);
        for (rank, other) in all.iter().enumerate() {
            let other = String::from_utf8_lossy(other);
            let mut pairs = first.lines().zip(other.lines());
            if let Some((expected, found)) = pairs.find(|(expected, found)| expected != found) {
                return Err(Error::invalid(format!("rank 0 has {expected}, rank {rank} has {found}; give all ranks the same")));
            }
        }
        Ok(())
    }

    /// Returns the smallest number of all workers for each number of this one.
    pub fn min_over_workers<const N: usize>(&self, numbers: [u64; N]) -> Result<[u64; N]> {
        let mut all = try_vec(N * self.world().size(), 0u64)?;
        self.world().all_gather(as_bytes(&numbers), as_bytes_mut(&mut all), self.timeout())?;
        Ok(std::array::from_fn(|i| all.iter().skip(i).step_by(N).copied().min().unwrap_or(0)))
    }
}

/// Fails on all ranks if their libraries or their divisions differ.
fn compare_versions(world: &dyn Communicator, division: Division, timeout: Duration) -> Result<()> {
    let mut own = [0; VERSION_BYTES];
    let Division { tensor, pipeline } = division;
    let text = format!("{}, tensor_parallel {tensor}, pipeline_parallel {pipeline}", env!("CARGO_PKG_VERSION"));
    own[..text.len()].copy_from_slice(text.as_bytes());
    let mut all = try_vec(VERSION_BYTES * world.size(), 0)?;
    world.all_gather(&own, &mut all, Some(timeout))?;
    match all.chunks_exact(VERSION_BYTES).position(|version| version != own) {
        None => Ok(()),
        Some(rank) => {
            let other = String::from_utf8_lossy(&all[rank * VERSION_BYTES..][..VERSION_BYTES]);
            let other = other.trim_end_matches('\0');
            Err(Error::invalid(format!(
                "rank {rank} has version {other}, this rank has version {text}; give all ranks the same library and options"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::communicator::local::Local;
    use crate::error::Code;

    /// Runs `body` on all ranks. Returns their results.
    fn on_ranks<T: Send + 'static>(tensor: usize, body: fn(Group) -> T) -> Vec<T> {
        let division = Division { tensor, pipeline: 1 };
        let run = |world: Local| thread::spawn(move || body(Group::new(Arc::new(world), division, Duration::from_secs(60)).unwrap()));
        let ranks: Vec<_> = Local::group(tensor).into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn an_error_of_one_rank_is_an_error_of_all() {
        let results = on_ranks(3, |group| {
            let own = if group.place.rank() == 1 { Err(Error::capacity("no room (3, 2)")) } else { Ok(()) };
            group.agree(own).unwrap_err()
        });
        let messages: Vec<_> = results.iter().map(|error| (error.code(), error.message())).collect();
        let others = (Code::Capacity, "rank 1: no room (3, 2)");
        assert_eq!(messages, [others, (Code::Capacity, "no room (3, 2)"), others]);
        assert!(on_ranks(3, |group| group.agree(Ok(7))).into_iter().all(|result| result == Ok(7)));
    }

    #[test]
    fn different_settings_are_refused_on_all_ranks() {
        let results = on_ranks(2, |group| {
            let size = 16 << group.place.rank();
            group.compare(&format!("isa avx2\nblock_size {size}\n")).unwrap_err()
        });
        for error in results {
            assert_eq!(error.message(), "rank 0 has block_size 16, rank 1 has block_size 32; give all ranks the same");
        }
        assert!(on_ranks(2, |group| group.compare("block_size 16\n")).into_iter().all(|result| result.is_ok()));
    }

    #[test]
    fn records_may_differ_in_length() {
        for records in on_ranks(3, |group| group.gather(&vec![7; 5 * group.place.rank()]).unwrap()) {
            assert_eq!(records, [vec![], vec![7; 5], vec![7; 10]]);
        }
        for min in on_ranks(3, |group| group.min_over_workers([group.place.rank() as u64, 9 - group.place.rank() as u64]).unwrap()) {
            assert_eq!(min, [0, 7]);
        }
    }

    /// A rank whose `split` returns the whole group.
    struct Undivided(Local);

    impl Communicator for Undivided {
        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn size(&self) -> usize {
            self.0.size()
        }

        fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()> {
            self.0.broadcast(bytes, root, timeout)
        }

        fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
            self.0.all_gather(bytes, out, timeout)
        }

        fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
            self.0.all_to_all(bytes, out, timeout)
        }

        fn send(&self, bytes: &[u8], to: usize, timeout: Option<Duration>) -> Result<()> {
            self.0.send(bytes, to, timeout)
        }

        fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()> {
            self.0.receive(bytes, from, timeout)
        }

        fn split(&self, _color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
            self.0.split(0, timeout)
        }
    }

    #[test]
    fn a_wrong_division_by_the_host_is_refused_on_all_ranks() {
        let division = Division { tensor: 2, pipeline: 2 };
        let new = |world| thread::spawn(move || Group::new(Arc::new(Undivided(world)), division, Duration::from_secs(60)).err().unwrap());
        let ranks: Vec<_> = Local::group(4).into_iter().map(new).collect();
        for (rank, error) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
            let expected = format!("split of the communicator has returned rank {rank} of 4; must be rank {} of 2", rank % 2);
            assert_eq!(error.message(), expected);
        }
    }

    #[test]
    fn another_version_of_the_library_is_refused() {
        let ranks: Vec<_> = Local::group(2).into_iter().collect();
        let [first, second] = <[Local; 2]>::try_from(ranks).ok().unwrap();
        let other = thread::spawn(move || {
            let mut version = [0; VERSION_BYTES];
            version[..5].copy_from_slice(b"0.0.1");
            second.all_gather(&version, &mut [0; 2 * VERSION_BYTES], None)
        });
        let group = Group::new(Arc::new(first), Division { tensor: 2, pipeline: 1 }, Duration::from_secs(60));
        let error = group.err().unwrap();
        assert!(error.message().starts_with("rank 1 has version 0.0.1, this rank has version "), "{error}");
        assert_eq!((error.code(), other.join().unwrap()), (Code::InvalidArgument, Ok(())));
    }

    #[test]
    fn a_communicator_of_another_size_is_refused() {
        let new = |world: Local| Group::new(Arc::new(world), Division { tensor: 2, pipeline: 2 }, Duration::from_secs(60));
        let ranks: Vec<_> = Local::group(2).into_iter().map(|world| thread::spawn(move || new(world).err().unwrap())).collect();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(
                error.message().starts_with("tensor_parallel 2 times pipeline_parallel 2 is 4, but the communicator has 2 ranks"),
                "{error}"
            );
        }
    }
}
