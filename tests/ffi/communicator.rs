//! Communicators that hosts pass to the library.

use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;

use super::*;

const LIMIT: Option<Duration> = Some(Duration::from_secs(300));

/// Runs `body` on a thread for each of two ranks.
fn with_ranks<T: Send>(body: impl Fn(pllm_communicator) -> T + Sync) -> [T; 2] {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let dir = Some(PathBuf::from("/dev/shm")).filter(|dir| dir.is_dir()).unwrap_or_else(std::env::temp_dir);
    let path = dir.join(format!("pagedllm-ffi-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let (path, body) = (&path, &body);
            scope.spawn(move || body(own::publish(Arc::new(SharedMemory::join(path, rank, 2, LIMIT).unwrap()))))
        });
        ranks.map(|rank| rank.join().unwrap())
    })
}

fn handle(functions: &pllm_communicator) -> CommunicatorHandle {
    // SAFETY: a live struct whose functions keep to the contract.
    unsafe { to_communicator(functions) }.unwrap().unwrap()
}

fn close(functions: &pllm_communicator) {
    // SAFETY: the last call.
    unsafe { functions.close.unwrap()(functions.user_data) }
}

/// A communicator of a host, which passes calls to one of the library.
struct Passing {
    inner: pllm_communicator,
    calls: AtomicU32,
    last_timeout: AtomicU32,
}

unsafe extern "C" fn pass_broadcast(host: *mut c_void, bytes: *mut c_void, len: u64, root: u32, timeout_ms: u64) -> i32 {
    // SAFETY: the user data is a `Passing`.
    let host = unsafe { &*host.cast::<Passing>() };
    host.calls.fetch_add(1, Ordering::Relaxed);
    host.last_timeout.store(timeout_ms as u32, Ordering::Relaxed);
    // SAFETY: the contract of the caller.
    unsafe { host.inner.broadcast.unwrap()(host.inner.user_data, bytes, len, root, timeout_ms) }
}

unsafe extern "C" fn pass_gather(host: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32 {
    // SAFETY: as above.
    let inner = unsafe { &*host.cast::<Passing>() }.inner;
    // SAFETY: as above.
    unsafe { inner.all_gather.unwrap()(inner.user_data, bytes, len, out, timeout_ms) }
}

unsafe extern "C" fn pass_exchange(host: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32 {
    // SAFETY: as above.
    let inner = unsafe { &*host.cast::<Passing>() }.inner;
    // SAFETY: as above.
    unsafe { inner.all_to_all.unwrap()(inner.user_data, bytes, len, out, timeout_ms) }
}

unsafe extern "C" fn pass_send(host: *mut c_void, bytes: *const c_void, len: u64, to: u32, timeout_ms: u64) -> i32 {
    // SAFETY: as above.
    let inner = unsafe { &*host.cast::<Passing>() }.inner;
    // SAFETY: as above.
    unsafe { inner.send.unwrap()(inner.user_data, bytes, len, to, timeout_ms) }
}

unsafe extern "C" fn pass_receive(host: *mut c_void, bytes: *mut c_void, len: u64, from: u32, timeout_ms: u64) -> i32 {
    // SAFETY: as above.
    let inner = unsafe { &*host.cast::<Passing>() }.inner;
    // SAFETY: as above.
    unsafe { inner.receive.unwrap()(inner.user_data, bytes, len, from, timeout_ms) }
}

unsafe extern "C" fn pass_split(
    host: *mut c_void,
    color: u32,
    timeout_ms: u64,
    out_user_data: *mut *mut c_void,
    out_rank: *mut u32,
    out_size: *mut u32,
) -> i32 {
    // SAFETY: as above.
    let mut inner = unsafe { &*host.cast::<Passing>() }.inner;
    // SAFETY: as above.
    unsafe {
        let split = inner.split.unwrap();
        let code = split(inner.user_data, color, timeout_ms, &raw mut inner.user_data, &raw mut inner.rank, &raw mut inner.size);
        out_user_data.write(passing(inner).user_data);
        out_rank.write(inner.rank);
        out_size.write(inner.size);
        code
    }
}

unsafe extern "C" fn pass_close(host: *mut c_void) {
    // SAFETY: the user data of `passing`, for the last time.
    let host = unsafe { Box::from_raw(host.cast::<Passing>()) };
    close(&host.inner);
}

fn passing(inner: pllm_communicator) -> pllm_communicator {
    let host = Passing { inner, calls: AtomicU32::new(0), last_timeout: AtomicU32::new(u32::MAX) };
    pllm_communicator {
        user_data: Box::into_raw(Box::new(host)).cast(),
        rank: inner.rank,
        size: inner.size,
        broadcast: Some(pass_broadcast),
        all_gather: Some(pass_gather),
        all_to_all: Some(pass_exchange),
        send: Some(pass_send),
        receive: Some(pass_receive),
        split: Some(pass_split),
        close: Some(pass_close),
        ..pllm_communicator::defaults()
    }
}

/// Calls all functions of a group of two ranks.
fn use_all(group: &dyn Communicator) {
    let (rank, other) = (group.rank(), 1 - group.rank());
    let (own, theirs) = (vec![rank as u8; 70_000], vec![other as u8; 70_000]);
    let mut bytes = own.clone();
    group.broadcast(&mut bytes, 1, LIMIT).unwrap();
    assert!(bytes == vec![1; 70_000]);
    let mut out = vec![9; 140_000];
    let expected = [vec![0; 70_000], vec![1; 70_000]].concat();
    group.all_gather(&own, &mut out, None).unwrap();
    assert!(out == expected);
    group.all_to_all(&expected, &mut out, LIMIT).unwrap();
    assert!(out == vec![rank as u8; 140_000]);
    group.send(&own, other, LIMIT).unwrap();
    group.receive(&mut bytes, other, LIMIT).unwrap();
    assert!(bytes == theirs);
    let part = group.split(rank, LIMIT).unwrap();
    assert_eq!((part.rank(), part.size()), (0, 1));
    part.broadcast(&mut [1], 0, LIMIT).unwrap();
}

#[test]
fn a_communicator_of_the_library_is_used_directly_and_closed_by_its_owner() {
    for is_adopted in [false, true] {
        let messages = with_ranks(|functions| {
            let handle = handle(&functions);
            let group = handle.take().unwrap();
            assert!(handle.take().is_none());
            use_all(&*group);
            if functions.rank == 0 {
                match is_adopted {
                    true => handle.adopt(),
                    false => close(&functions),
                }
                drop(group);
                return String::new();
            }
            let error = group.receive(&mut [0], 0, LIMIT).unwrap_err();
            drop(group);
            close(&functions);
            error.message().to_string()
        });
        assert_eq!(messages[1], "rank 0 has left the group");
    }
}

#[test]
fn the_functions_of_a_host_are_called_and_closed_by_their_owner() {
    let barrier = Barrier::new(2);
    for is_adopted in [false, true] {
        with_ranks(|inner| {
            let functions = passing(inner);
            // SAFETY: the host lives until it is closed.
            let host = unsafe { &*functions.user_data.cast::<Passing>() };
            let handle = handle(&functions);
            let group = handle.take().unwrap();
            use_all(&*group);
            assert_eq!((host.calls.load(Ordering::Relaxed), host.last_timeout.load(Ordering::Relaxed)), (1, 300_000));
            group.broadcast(&mut [0], 0, None).unwrap();
            assert_eq!(host.last_timeout.load(Ordering::Relaxed), 0);
            barrier.wait();
            let error = group.send(&[], group.rank(), LIMIT).unwrap_err();
            assert_eq!(error.message(), format!("send of the communicator of rank {} has returned 9", group.rank()));
            let error = group.broadcast(&mut [0], 0, None).unwrap_err();
            assert!(error.message().starts_with("an earlier call of the communicator of rank "), "{error}");
            match is_adopted {
                true => handle.adopt(),
                false => close(&functions),
            }
        });
    }
}

#[test]
fn an_incomplete_communicator_is_refused() {
    with_ranks(|functions| {
        type Change = fn(&mut pllm_communicator);
        let changes: [(Change, &str); 8] = [
            (|c| c.broadcast = None, "pllm_communicator.broadcast is NULL; set all functions except split"),
            (|c| c.all_gather = None, "pllm_communicator.all_gather is NULL; set all functions except split"),
            (|c| c.all_to_all = None, "pllm_communicator.all_to_all is NULL; set all functions except split"),
            (|c| c.send = None, "pllm_communicator.send is NULL; set all functions except split"),
            (|c| c.receive = None, "pllm_communicator.receive is NULL; set all functions except split"),
            (|c| c.close = None, "pllm_communicator.close is NULL; set all functions except split"),
            (|c| c.rank = 2, "pllm_communicator.rank is 2; must be below size (2)"),
            (
                |c| c.struct_size = 72,
                "pllm_communicator.struct_size is 72; set it to sizeof(pllm_communicator), which is 80 in this library",
            ),
        ];
        for (change, message) in changes {
            let mut changed = functions;
            change(&mut changed);
            // SAFETY: a live struct.
            let error = unsafe { to_communicator(&changed) }.unwrap_err();
            assert_eq!((error.code(), error.message()), (Code::InvalidArgument, message));
        }
        let undivided = pllm_communicator { split: None, ..functions };
        let error = handle(&undivided).take().unwrap().split(0, LIMIT).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported);
        close(&functions);
    });
    // SAFETY: NULL is allowed.
    assert!(unsafe { to_communicator(std::ptr::null()) }.unwrap().is_none());
}
