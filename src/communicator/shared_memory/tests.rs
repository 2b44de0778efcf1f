use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread;

use super::segment::{JOINED, RING_BYTES, SLOTS, file_bytes};
use super::*;
use crate::sys::counting::peak_of;
use crate::sys::random::Random;
use crate::sys::shared_mapping::SharedMapping;

/// A call that makes no progress for this time fails, also on a busy machine.
const STALL: Option<Duration> = Some(Duration::from_secs(300));

/// A path without a file, which is removed with all that begins with it.
struct TestPath(PathBuf);

impl TestPath {
    fn new() -> TestPath {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        TestPath(dir.join(format!("pagedllm-group-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))))
    }

    fn files(&self) -> Vec<PathBuf> {
        let (dir, name) = (self.0.parent().unwrap(), self.0.file_name().unwrap().to_str().unwrap());
        let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let ours = names.filter(|other| other.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')));
        ours.map(|name| dir.join(name)).collect()
    }
}

impl Drop for TestPath {
    fn drop(&mut self) {
        self.files().iter().for_each(|file| drop(std::fs::remove_file(file)));
    }
}

/// Runs `body` on a thread for each rank once all have joined, so that a failing call of one rank
/// cannot fail the start of another. Returns the results in the order of the ranks.
fn with_ranks<T: Send>(size: usize, body: impl Fn(SharedMemory) -> T + Sync) -> Vec<T> {
    let path = TestPath::new();
    let joined = Barrier::new(size);
    let run = |rank| {
        let group = SharedMemory::join(&path.0, rank, size, STALL);
        joined.wait();
        body(group.unwrap())
    };
    let results = thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(path.files(), Vec::<PathBuf>::new(), "all files are removed");
    results
}

/// Bytes that differ between ranks, receivers and calls.
fn message(from: usize, to: usize, call: usize, len: usize) -> Vec<u8> {
    let first = (from * 131 + to * 29 + call * 7) as u8;
    (0..len).map(|i| first.wrapping_add((i ^ (i >> 8) ^ (i >> 16)) as u8)).collect()
}

/// A length at which chunks and rings begin and end, or a random one.
fn length(random: &mut Random) -> usize {
    match random.below(16) {
        0 => random.below(3),
        1 => SLOT_BYTES + random.below(3) - 1,
        2 => random.below(5 * SLOT_BYTES),
        3 => SLOTS as usize * SLOT_BYTES + random.below(SLOT_BYTES),
        _ => random.below(3000),
    }
}

/// Makes a random call, which is the same on all ranks, and compares the result.
fn random_call(group: &dyn Communicator, random: &mut Random, call: usize) {
    let (rank, size) = (group.rank(), group.size());
    let len = length(random);
    match random.below(5) {
        0 => {
            let root = random.below(size);
            let mut bytes = if rank == root { message(root, 0, call, len) } else { vec![0; len] };
            group.broadcast(&mut bytes, root, STALL).unwrap();
            assert!(bytes == message(root, 0, call, len), "broadcast of {len} bytes");
        }
        1 => {
            let mut out = vec![0; len * size];
            group.all_gather(&message(rank, 0, call, len), &mut out, STALL).unwrap();
            assert!(out == (0..size).flat_map(|from| message(from, 0, call, len)).collect::<Vec<_>>(), "all_gather of {len} bytes");
        }
        2 => {
            let bytes: Vec<u8> = (0..size).flat_map(|to| message(rank, to, call, len)).collect();
            let mut out = vec![0; len * size];
            group.all_to_all(&bytes, &mut out, STALL).unwrap();
            assert!(out == (0..size).flat_map(|from| message(from, rank, call, len)).collect::<Vec<_>>(), "all_to_all of {len} bytes");
        }
        3 => {
            // Several messages from one rank to another, some of them longer than the ring.
            let (from, to, count) = (random.below(size), random.below(size), random.below(4));
            let len = if random.below(20) == 0 { RING_BYTES + len } else { len };
            for i in 0..count {
                let expected = message(from, to, call + i, len);
                if from != to && rank == from {
                    group.send(&expected, to, STALL).unwrap();
                } else if from != to && rank == to {
                    let mut bytes = vec![0; len];
                    group.receive(&mut bytes, from, STALL).unwrap();
                    assert!(bytes == expected, "message of {len} bytes");
                }
            }
        }
        _ => {
            let numbers = |rank| {
                let mut random = Random((call * 64 + rank) as u64);
                (0..len / 4).map(|_| random.unit() * 10f32.powi(random.below(9) as i32)).collect::<Vec<f32>>()
            };
            let (mut own, mut default) = (numbers(rank), numbers(rank));
            let mut scratch = OrderedSum::default();
            group.all_reduce(&mut own, &mut scratch, STALL).unwrap();
            scratch.all_reduce(group, &mut default, STALL).unwrap();
            let mut expected = numbers(0);
            (1..size).for_each(|rank| expected.iter_mut().zip(numbers(rank)).for_each(|(sum, number)| *sum += number));
            let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
            assert!(bits(&own) == bits(&expected) && bits(&default) == bits(&expected), "all_reduce of {len} bytes");
        }
    }
}

/// Sets the counters of a rank as after many calls, so that they overflow soon.
fn age(group: &SharedMemory) {
    let (rank, size) = (group.rank, group.size());
    group.segment.posted(rank).publish(0u32.wrapping_sub(20));
    group.segment.done(rank).publish(0u32.wrapping_sub(20));
    for other in 0..size {
        let old = 0u32.wrapping_sub(RING_BYTES as u32 / 2 + 77 * (rank * size + other) as u32);
        group.segment.head(rank, other).publish(old);
        let old = 0u32.wrapping_sub(RING_BYTES as u32 / 2 + 77 * (other * size + rank) as u32);
        group.segment.tail(other, rank).publish(old);
    }
}

#[test]
fn random_calls_of_2_to_5_ranks_have_the_expected_bytes() {
    for size in 2..=5 {
        for seed in 0..2 {
            let barrier = Barrier::new(size);
            with_ranks(size, |group| {
                if seed % 2 == 1 {
                    age(&group);
                    barrier.wait();
                }
                let mut random = Random(seed << 8 | size as u64);
                (0..60).for_each(|call| random_call(&group, &mut random, call));
            });
        }
    }
}

#[test]
fn a_single_rank_needs_no_other() {
    with_ranks(1, |group| (0..60).for_each(|call| random_call(&group, &mut Random(call as u64), call)));
}

#[test]
fn parts_of_a_group_and_the_group_work_side_by_side() {
    with_ranks(5, |group| {
        let color = group.rank() % 2;
        let part = group.split(color, STALL).unwrap();
        assert_eq!((part.rank(), part.size()), (group.rank() / 2, 3 - color));
        let pair = part.split(part.rank() / 2, STALL).unwrap();
        let mut random = [Random(1), Random(2 + color as u64), Random(9)];
        for call in 0..30 {
            random_call(&group, &mut random[0], call);
            random_call(&*part, &mut random[1], call);
            random_call(&*pair, &mut random[2], call);
        }
    });
}

#[test]
fn a_root_and_a_sender_return_before_the_others_have_read() {
    let sent = Barrier::new(2);
    with_ranks(2, |group| {
        let [mut control, activations] = [message(0, 1, 0, 400_000), message(0, 1, 1, 1 << 20)];
        if group.rank() == 0 {
            for _ in 0..2 {
                group.broadcast(&mut control, 0, STALL).unwrap();
                group.send(&activations, 1, STALL).unwrap();
            }
            sent.wait();
            // The last bytes are read after rank 0 has left.
            return;
        }
        sent.wait();
        for _ in 0..2 {
            let (mut received, mut bytes) = (vec![0; control.len()], vec![0; activations.len()]);
            group.broadcast(&mut received, 0, STALL).unwrap();
            group.receive(&mut bytes, 0, STALL).unwrap();
            assert!(received == control && bytes == activations);
        }
        let error = group.receive(&mut [0], 0, STALL).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Internal, "rank 0 has left the group"));
    });
}

#[test]
fn calls_after_the_first_allocate_nothing() {
    for size in [3, 5] {
        with_ranks(size, |group| {
            let (mut x, mut scratch) = (vec![1.0; 40_000], OrderedSum::default());
            let mut out = vec![0; 30_000 * size];
            let mut run = || {
                group.all_reduce(&mut x, &mut scratch, STALL).unwrap();
                group.broadcast(&mut out, 1, STALL).unwrap();
                group.all_gather(&[group.rank() as u8; 30_000], &mut out, STALL).unwrap();
                let bytes = out.clone();
                group.all_to_all(&bytes, &mut out, STALL).unwrap();
                if group.rank() == 0 {
                    group.send(&out, 2, STALL).unwrap();
                } else if group.rank() == 2 {
                    group.receive(&mut out, 0, STALL).unwrap();
                }
            };
            run();
            // The copy above is the only allocation.
            assert_eq!(peak_of(run).1, 30_000 * size);
        });
    }
}

#[test]
fn a_timeout_ends_the_group() {
    let failed = Barrier::new(2);
    with_ranks(2, |group| {
        if group.rank() == 0 {
            let error = group.receive(&mut [0], 1, Some(Duration::from_millis(30))).unwrap_err();
            assert!(error.message().starts_with("rank 1 has not done its part within "), "{error}");
            assert_eq!(group.send(&[0], 1, STALL).unwrap_err(), error);
            failed.wait();
            return;
        }
        failed.wait();
        let error = group.send(&[0], 0, STALL).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Internal, "a call of rank 0 has failed"));
    });
}

#[test]
fn a_failure_ends_the_waits_of_the_other_ranks() {
    let joined = Barrier::new(3);
    let errors = with_ranks(3, |group| {
        joined.wait();
        match group.rank() {
            0 => group.receive(&mut [0], 1, STALL).unwrap_err(),
            1 => group.broadcast(&mut [0], 2, STALL).unwrap_err(),
            _ => group.send(&[], 2, STALL).unwrap_err(),
        }
    });
    assert_eq!(errors[2].message(), "rank 2 sends to itself");
    for error in &errors[..2] {
        let allowed = ["a call of rank 2 has failed", "rank 2 has left the group", "a call of rank 1 has failed"];
        assert!(allowed.contains(&error.message()), "{error}");
    }
}

#[test]
fn a_rank_that_has_left_is_noticed_without_a_call() {
    let path = TestPath::new();
    let [first, second] = [0, 1].map(|rank| {
        let path = path.0.clone();
        std::thread::spawn(move || SharedMemory::join(&path, rank, 2, STALL).unwrap())
    });
    let [first, second] = [first, second].map(|thread| thread.join().unwrap());
    assert_eq!(second.check(), Ok(()));
    drop(first);
    assert_eq!(second.check().unwrap_err().message(), "rank 0 has left the group");
}

#[test]
fn a_rank_without_its_lock_counts_as_ended() {
    let unlocked = Barrier::new(2);
    with_ranks(2, |group| {
        if group.rank() == 0 {
            // As at the end of a process of another container.
            file_locks::unlock(group.segment.file(), rank_lock(0));
        }
        unlocked.wait();
        if group.rank() == 1 {
            let error = group.receive(&mut [0], 0, STALL).unwrap_err();
            assert_eq!(error.message(), "the process of rank 0 has ended");
            assert!(group.check().is_err());
        }
        unlocked.wait();
    });
}

#[test]
fn different_calls_of_the_ranks_are_an_error() {
    let different = with_ranks(2, |group| match group.rank() {
        0 => group.all_gather(&[0; 8], &mut [0; 16], STALL).unwrap_err(),
        _ => {
            group.broadcast(&mut [0; 9], 1, STALL).unwrap();
            group.broadcast(&mut [0; 9], 0, STALL).unwrap_err()
        }
    });
    let expected = "rank 1 has called broadcast with 9 bytes, and this rank all_gather with 8 bytes; all ranks must make the same calls";
    assert_eq!(different[0].message(), expected);
    let lengths = with_ranks(2, |group| match group.rank() {
        0 => group.send(&[0; 3], 1, STALL).and_then(|()| group.receive(&mut [0], 1, STALL)).unwrap_err(),
        _ => group.receive(&mut [0; 4], 0, STALL).unwrap_err(),
    });
    assert_eq!(lengths[1].message(), "rank 0 has sent 3 bytes, and 4 were expected");
}

#[test]
fn lengths_and_ranks_that_do_not_fit_are_an_error() {
    type Call = fn(&SharedMemory) -> Result<()>;
    let calls: [(Call, &str); 4] = [
        (|group| group.all_gather(&[0; 8], &mut [0; 15], STALL), "out has 15 bytes, which is wrong for 2 ranks"),
        (|group| group.all_to_all(&[0; 7], &mut [0; 7], STALL), "out has 7 bytes, which is wrong for 2 ranks"),
        (|group| group.broadcast(&mut [], 2, STALL), "rank is 2; must be below 2"),
        (|group| group.receive(&mut [], 5, STALL), "rank is 5; must be below 2"),
    ];
    for (call, message) in calls {
        let errors = with_ranks(2, |group| if group.rank() == 0 { call(&group).err() } else { None });
        assert_eq!(errors[0].as_ref().unwrap().message(), message);
    }
}

fn join(path: &TestPath, rank: usize, size: usize, timeout: Option<Duration>) -> Result<SharedMemory> {
    SharedMemory::join(&path.0, rank, size, timeout)
}

#[test]
fn a_rank_outside_of_the_group_is_refused() {
    let path = TestPath::new();
    for (rank, size, message) in [
        (0, 0, "size is 0; must be 1 to 64"),
        (0, 65, "size is 65; must be 1 to 64"),
        (2, 2, "rank is 2; must be below size (2)"),
        (usize::MAX, 3, "must be below size (3)"),
    ] {
        let error = join(&path, rank, size, STALL).err().unwrap();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(message), "{error}");
    }
    assert!(path.files().is_empty());
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let path = TestPath::new();
    let short = Some(Duration::from_millis(30));
    let error = join(&path, 1, 3, short).err().unwrap();
    assert!(error.message().contains("rank 0 has not joined within ") && error.message().ends_with("start all 3 ranks"), "{error}");
    let error = join(&path, 0, 3, short).err().unwrap();
    assert_eq!(error.code(), Code::Io);
    assert!(error.message().contains("rank 1 has not joined within "), "{error}");
    assert!(path.files().is_empty());
}

#[test]
fn a_rank_that_is_started_twice_is_refused_and_the_group_continues() {
    let path = TestPath::new();
    let joined = Barrier::new(3);
    let run = |rank| {
        let group = join(&path, rank, 2, STALL).unwrap();
        joined.wait();
        joined.wait();
        group.all_gather(&[rank as u8], &mut [0; 2], STALL).unwrap();
    };
    thread::scope(|scope| {
        let _ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
        joined.wait();
        for rank in 0..2 {
            let error = join(&path, rank, 2, STALL).err().unwrap();
            let expected = format!("{}: rank {rank} is already in use; start each rank once, or choose another path", path.0.display());
            assert_eq!((error.code(), error.message()), (Code::InvalidArgument, &*expected));
        }
        // A rank of another group that comes too late does not end this one.
        let error = join(&path, 2, 4, STALL).err().unwrap();
        assert!(error.message().contains("rank 0 expects 2 ranks, not 4"), "{error}");
        joined.wait();
    });
}

#[test]
fn another_number_of_ranks_is_an_error_of_all_ranks() {
    let path = TestPath::new();
    thread::scope(|scope| {
        let first = scope.spawn(|| join(&path, 0, 2, STALL).err().unwrap());
        let second = join(&path, 1, 3, STALL).err().unwrap();
        assert!(second.message().ends_with("rank 0 expects 2 ranks, not 3; start all ranks with the same size"), "{second}");
        let first = first.join().unwrap();
        assert!(first.message().ends_with("rank 1 expects 3 ranks, not 2; start all ranks with the same size"), "{first}");
        assert_eq!((first.code(), second.code()), (Code::InvalidArgument, Code::InvalidArgument));
    });
}

#[test]
fn another_version_of_the_format_is_an_error_of_all_ranks() {
    let path = TestPath::new();
    thread::scope(|scope| {
        let first = scope.spawn(|| join(&path, 0, 2, STALL).err().unwrap());
        while std::fs::metadata(&path.0).map_or(0, |file| file.len()) < file_bytes(2) as u64 {
            assert!(!first.is_finished());
            thread::yield_now();
        }
        let file = std::fs::File::options().write(true).open(&path.0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &99u32.to_ne_bytes(), 8).unwrap();
        let second = join(&path, 1, 2, STALL).err().unwrap();
        assert!(second.message().contains("version 99 of the format, this library has 1"), "{second}");
        let first = first.join().unwrap();
        assert!(first.message().contains("rank 1 has version 1 of the format"), "{first}");
        assert_eq!((first.code(), second.code()), (Code::Unsupported, Code::Unsupported));
    });
}

#[test]
fn the_file_of_a_rank_0_that_has_ended_is_replaced() {
    let path = TestPath::new();
    // The states of a file that a killed process left.
    let complete = join(&path, 0, 1, STALL).unwrap();
    let mut stale = std::fs::read(&path.0).unwrap();
    stale.truncate(1 << 20);
    drop(complete);
    for len in [0, 64, 5000, stale.len()] {
        std::fs::write(&path.0, &stale[..len]).unwrap();
        let groups = thread::scope(|scope| {
            let ranks = [1, 0].map(|rank| {
                scope.spawn({
                    let path = &path;
                    move || join(path, rank, 2, STALL).unwrap()
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        assert_eq!(groups.map(|group| group.size()), [2, 2]);
        assert!(path.files().is_empty());
    }
}

#[test]
fn a_file_of_another_program_is_not_replaced() {
    let path = TestPath::new();
    std::fs::write(&path.0, "precious contents of another program").unwrap();
    for rank in 0..2 {
        let error = join(&path, rank, 2, STALL).err().unwrap();
        assert!(error.message().ends_with("not the file of a communicator; remove it or choose another path"), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&path.0).unwrap(), "precious contents of another program");
    for path in ["/dev/null", "/"] {
        assert!(SharedMemory::join(Path::new(path), 1, 2, STALL).is_err());
    }
    for rank in 0..2 {
        let error = SharedMemory::join(Path::new("/nonexistent/group"), rank, 2, Some(Duration::ZERO)).err().unwrap();
        assert!(error.message().starts_with("/nonexistent/group: "), "{error}");
    }
}

#[test]
fn only_one_of_many_that_start_as_rank_0_succeeds() {
    let path = TestPath::new();
    std::fs::write(&path.0, "").unwrap();
    let tried = Barrier::new(6);
    let count = thread::scope(|scope| {
        let starts = [(); 6].map(|()| {
            scope.spawn(|| {
                let group = join(&path, 0, 1, STALL);
                tried.wait();
                match group {
                    Ok(_) => 1,
                    Err(error) => {
                        assert!(error.message().contains("rank 0 is already in use"), "{error}");
                        0
                    }
                }
            })
        });
        starts.map(|start| start.join().unwrap()).into_iter().sum::<usize>()
    });
    assert_eq!(count, 1);
}

/// All words of the file change at random while the ranks make calls. Calls may fail or return any
/// bytes.
#[test]
fn a_damaged_file_causes_no_invalid_access() {
    for seed in 0..6 {
        let path = TestPath::new();
        let size = 3;
        let (ended, joined) = (AtomicBool::new(false), Barrier::new(size + 1));
        thread::scope(|scope| {
            let rank = |rank| {
                let group = join(&path, rank, size, STALL).unwrap();
                joined.wait();
                let limit = Some(Duration::from_millis(20));
                let mut out = vec![0; 3 * 70_000];
                for call in 0..200 {
                    let mut numbers = [0.0; 20_000];
                    let results = [
                        group.all_gather(&[1; 70_000], &mut out, limit),
                        group.all_reduce(&mut numbers, &mut OrderedSum::default(), limit),
                        group.send(&numbers.map(|_| 1), (rank + 1) % size, limit),
                        group.receive(&mut out[..20_000], (rank + 2) % size, limit),
                        group.broadcast(&mut out, call % size, limit),
                        group.all_to_all(&[3; 90_000], &mut out[..90_000], limit),
                    ];
                    if results.iter().any(Result::is_err) && call > 20 {
                        break;
                    }
                }
            };
            let ranks = [0, 1, 2].map(|number| scope.spawn(move || rank(number)));
            joined.wait();
            let file = std::fs::File::options().read(true).write(true).open(&path.0).unwrap();
            let map = SharedMapping::new(&file, file_bytes(size)).unwrap();
            scope.spawn({
                let ended = &ended;
                move || {
                    let mut random = Random(seed);
                    while !ended.load(Ordering::Relaxed) {
                        // Mostly the counters. The header would end all calls at once.
                        let words = if random.below(4) > 0 { 512 } else { 100_000 };
                        let offset = 4096 + 4 * random.below(words);
                        let value = *random.pick(&[0, 1, JOINED, u32::MAX, 1 << 31, 1 << 22, random.0 as u32]);
                        map.word(offset).store(value, Ordering::Relaxed);
                        thread::yield_now();
                    }
                }
            });
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
            ended.store(true, Ordering::Relaxed);
        });
    }
}
