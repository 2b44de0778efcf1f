//! Ranks that are processes: their start, and the end of one while the others wait for it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::alone;
use crate::support::rank_process::RankProcess;
use pagedllm::communicator::Communicator;
use pagedllm::communicator::shared_memory::SharedMemory;
use pagedllm::error::Error;

const RANK: &str = "PLLM_TEST_RANK";
/// Size of the groups.
const SIZE: usize = 3;
/// A wait without a limit must see the end of a process in this time, also on a busy machine.
const BOUND: Duration = Duration::from_secs(30);
/// Time for which a forked child lives. It is longer than the bound.
const CHILD_SECONDS: u64 = 60;

/// A path without a file. The file of killed ranks is removed at the end.
struct TestPath(PathBuf);

impl TestPath {
    fn new(name: &str) -> TestPath {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        TestPath(dir.join(format!("pagedllm-{name}-{}", std::process::id())))
    }
}

impl Drop for TestPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Starts a process with this rank. It obeys commands, one a line, and answers each with a line.
fn start_rank(path: &Path, rank: usize) -> RankProcess {
    RankProcess::start("communicator::rank_of_another_test", RANK, &format!("{rank} {}", path.display()))
}

/// Runs the commands of another test. Does nothing otherwise.
#[test]
fn rank_of_another_test() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let (rank, path) = rank.split_once(' ').unwrap();
    let rank: usize = rank.parse().unwrap();
    let group = SharedMemory::join(Path::new(path), rank, SIZE, None);
    println!("\nanswer: {}", group.as_ref().map_or_else(|error| error.message(), |_| "joined"));
    let Ok(group) = group else { return };
    for command in std::io::stdin().lines() {
        let command = command.unwrap();
        let result = match command.as_str() {
            "gather" => gather(&group),
            "receive" => group.receive(&mut [0], (rank + 1) % SIZE, None),
            "fork" => {
                println!("\nanswer: {}", fork_and_sleep());
                continue;
            }
            other => panic!("{other}"),
        };
        println!("\nanswer: {}", result.err().as_ref().map_or("done", Error::message));
    }
}

fn gather(group: &SharedMemory) -> Result<(), Error> {
    let mut out = [0; SIZE];
    group.all_gather(&[7 + group.rank() as u8], &mut out, None)?;
    assert_eq!(out, [7, 8, 9]);
    Ok(())
}

/// Starts a child that has the descriptors of this process and does nothing. Returns its id.
fn fork_and_sleep() -> i32 {
    // SAFETY: the child only makes system calls.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::close(0);
            libc::close(1);
            libc::close(2);
            let time = libc::timespec { tv_sec: CHILD_SECONDS as libc::time_t, tv_nsec: 0 };
            libc::nanosleep(&raw const time, std::ptr::null_mut());
            libc::_exit(0);
        }
        child
    }
}

fn start(path: &Path) -> [RankProcess; SIZE] {
    let mut ranks = [2, 1, 0].map(|rank| start_rank(path, rank));
    ranks.reverse();
    for rank in &mut ranks {
        assert_eq!(rank.answer(), "joined");
    }
    ranks
}

fn all_gather(ranks: &mut [RankProcess; SIZE]) {
    ranks.iter_mut().for_each(|rank| rank.command("gather"));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.answer(), "done"));
}

/// Kills a rank while the others wait for different ranks. They see it in time.
fn kill_and_check(ranks: &mut [RankProcess; SIZE], killed: usize) {
    let others: Vec<usize> = (0..SIZE).filter(|&rank| rank != killed).collect();
    ranks[others[0]].command("gather");
    ranks[others[1]].command("receive");
    // Both ranks sleep in their calls, or soon will.
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    ranks[killed].signal(libc::SIGKILL);
    let answers: Vec<String> = others.iter().map(|&rank| ranks[rank].answer()).collect();
    let elapsed = began.elapsed();
    assert!(elapsed < BOUND, "{elapsed:?}");
    let ended = format!("the process of rank {killed} has ended");
    assert!(answers.contains(&ended), "{answers:?}");
    for answer in answers {
        assert!(answer == ended || others.iter().any(|rank| answer == format!("a call of rank {rank} has failed")), "{answer}");
    }
}

#[test]
fn the_end_of_a_process_ends_the_waits_of_the_others() {
    let _alone = alone();
    for killed in 0..SIZE {
        let path = TestPath::new("killed");
        let mut ranks = start(&path.0);
        all_gather(&mut ranks);
        kill_and_check(&mut ranks, killed);
        // The next run replaces the file, also while processes of the old one live.
        if killed == 0 {
            drop(ranks);
            all_gather(&mut start(&path.0));
        }
    }
}

#[test]
fn a_forked_child_does_not_keep_a_killed_rank_alive() {
    let _alone = alone();
    let path = TestPath::new("forked");
    let mut ranks = start(&path.0);
    let children = ranks.each_mut().map(|rank| {
        rank.command("fork");
        rank.answer().parse::<i32>().unwrap()
    });
    assert!(children.iter().all(|&child| child > 0));
    all_gather(&mut ranks);
    kill_and_check(&mut ranks, 0);
    drop(ranks);
    // The child of rank 0 has the lock of the old file.
    assert!(path.0.exists());
    all_gather(&mut start(&path.0));
    // SAFETY: calls without pointers. The children still sleep, so their ids are theirs.
    children.iter().for_each(|&child| assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0));
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    let _alone = alone();
    let path = TestPath::new("second");
    let mut ranks = start(&path.0);
    for rank in 0..SIZE {
        let expected = format!("{}: rank {rank} is already in use; start each rank once, or choose another path", path.0.display());
        assert_eq!(start_rank(&path.0, rank).answer(), expected);
    }
    all_gather(&mut ranks);
}
