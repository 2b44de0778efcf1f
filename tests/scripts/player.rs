//! Plays a script: each of its calls makes one or a few calls of the C API.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use pagedllm::ffi::*;
use pagedllm::types::options::Isa;
use serde_json::{Value as Json, json};

use super::device::{self, Device};
use super::record::Record;
use super::structs::{self, Keep, known, tokens};

/// An instruction path: its name in the records, its C constant and its Rust value.
#[derive(Clone, Copy)]
pub struct InstructionPath {
    pub name: &'static str,
    pub c: u32,
    pub isa: Isa,
}

struct NamedEngine {
    raw: *mut pllm_engine,
    /// Names of sequences by id.
    names: BTreeMap<u64, String>,
    device: Option<Device>,
}

/// The state of a script: its objects by the names in the script.
pub struct Player {
    path: InstructionPath,
    dir: PathBuf,
    engines: BTreeMap<String, NamedEngine>,
    budgets: BTreeMap<String, *mut pllm_budget>,
    queues: BTreeMap<String, (*mut pllm_queue, bool)>,
    sequences: BTreeMap<String, u64>,
    pins: BTreeMap<String, u64>,
    /// Names of pending exports by sequence, and the exported states by name.
    exports: BTreeMap<u64, VecDeque<String>>,
    states: BTreeMap<String, Vec<u8>>,
    record: Record,
}

/// Returns the code of an error and frees the error. 0 is success.
fn code(error: *mut pllm_error) -> i32 {
    // SAFETY: null or an error that belongs to this function.
    unsafe {
        let code = pllm_error_code(error);
        pllm_error_free(error);
        code
    }
}

/// Returns the record of a call that returns only an error.
fn result(error: *mut pllm_error) -> Json {
    match code(error) {
        0 => json!({}),
        code => json!({ "code": code }),
    }
}

fn text(json: &Json) -> &str {
    json.as_str().unwrap_or_else(|| panic!("not a text: {json}"))
}

/// Returns a struct that a function of the C API fills.
fn sized<T>() -> T {
    // SAFETY: structs of the C API contain integers, floats and pointers, and start with their
    // size.
    unsafe {
        let mut value = std::mem::zeroed::<T>();
        (&raw mut value).cast::<u64>().write(size_of::<T>() as u64);
        value
    }
}

type Call = fn(&mut Player, &Json) -> Json;

/// All calls, by the member of the JSON object that selects the call.
pub const CALLS: [(&str, Call); 28] = [
    ("create", Player::create),
    ("free_engine", Player::free_engine),
    ("add", Player::add),
    ("admit", Player::admit),
    ("abort", Player::abort),
    ("step", Player::step),
    ("run", Player::run),
    ("fork", Player::fork),
    ("append", Player::append),
    ("rewind", Player::rewind),
    ("resume", Player::resume),
    ("release", Player::release),
    ("info", Player::info),
    ("export", Player::export),
    ("import", Player::import),
    ("damage", Player::damage),
    ("pin", Player::pin),
    ("unpin", Player::unpin),
    ("budget", Player::budget),
    ("resize", Player::resize),
    ("queue", Player::queue),
    ("read", Player::read),
    ("tokenize", Player::tokenize),
    ("render", Player::render),
    ("stats", Player::stats),
    ("health", Player::health),
    ("fail", Player::fail),
    ("advance", Player::advance),
];

impl Player {
    /// Plays the script on one instruction path and returns its record.
    pub fn play(script: &Json, path: InstructionPath, dir: &Path) -> Json {
        let mut player = Player {
            path,
            dir: dir.to_path_buf(),
            engines: BTreeMap::new(),
            budgets: BTreeMap::new(),
            queues: BTreeMap::new(),
            sequences: BTreeMap::new(),
            pins: BTreeMap::new(),
            exports: BTreeMap::new(),
            states: BTreeMap::new(),
            record: Record::default(),
        };
        for (index, call) in script["calls"].as_array().unwrap().iter().enumerate() {
            let found = CALLS.iter().find(|(name, _)| call.get(name).is_some());
            let (name, function) = found.unwrap_or_else(|| panic!("unknown call {call}"));
            let result = function(&mut player, call);
            player.record.call(index, name, result);
        }
        player.finish()
    }

    fn finish(mut self) -> Json {
        for engine in std::mem::take(&mut self.engines).into_values() {
            // SAFETY: created by this player and not freed.
            unsafe { pllm_engine_free(engine.raw) };
        }
        for (queue, _) in std::mem::take(&mut self.queues).into_values() {
            // SAFETY: as above.
            unsafe { pllm_queue_free(queue) };
        }
        for budget in std::mem::take(&mut self.budgets).into_values() {
            // SAFETY: as above.
            unsafe { pllm_budget_free(budget) };
        }
        self.record.to_json()
    }

    /// Returns the engine that the call names. The default name is "engine".
    fn engine(&self, call: &Json) -> *mut pllm_engine {
        let name = self.engine_name(call);
        self.engines.get(name).unwrap_or_else(|| panic!("there is no engine {name:?} for {call}")).raw
    }

    fn engine_name<'c>(&self, call: &'c Json) -> &'c str {
        call["engine"].as_str().unwrap_or("engine")
    }

    fn id(&self, name: &Json) -> u64 {
        self.sequences.get(text(name)).copied().unwrap_or(u64::MAX - 1)
    }

    fn name_sequence(&mut self, engine: &str, name: &str, id: u64) {
        self.sequences.insert(name.into(), id);
        self.record.sequences.entry(name.into()).or_default();
        self.engines.get_mut(engine).unwrap().names.insert(id, name.into());
    }

    fn queue_of(&self, call: &Json) -> *const pllm_queue {
        call["queue"].as_str().map_or(null(), |name| self.queues[name].0.cast_const())
    }

    fn create(&mut self, call: &Json) -> Json {
        known(call, "create model options device");
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(text(&call["model"]));
        let (mut raw, mut device) = (null_mut(), None);
        let mut outcome = json!({});
        if let Some(settings) = call.get("device") {
            let (engine, new) = device::engine(&model, self.path.isa, settings);
            (raw, device) = (engine, Some(new));
        } else {
            let mut keep = Keep::default();
            let mut options = structs::options(model.to_str().unwrap(), self.path.c, &call["options"], &mut keep);
            if let Some(name) = call["options"]["budget"].as_str() {
                options.budget = self.budgets[name];
            }
            if call["options"]["swap_directory"] == true {
                options.swap_path = keep.text(self.dir.to_str().unwrap());
            }
            // SAFETY: `keep` owns everything that the options refer to.
            outcome = result(unsafe { pllm_engine_create(&options, &mut raw) });
        }
        if !raw.is_null() {
            self.engines.insert(text(&call["create"]).into(), NamedEngine { raw, names: BTreeMap::new(), device });
        }
        outcome
    }

    fn free_engine(&mut self, call: &Json) -> Json {
        let engine = self.engines.remove(text(&call["free_engine"])).unwrap();
        // SAFETY: created by this player and not freed.
        unsafe { pllm_engine_free(engine.raw) };
        json!({})
    }

    fn add(&mut self, call: &Json) -> Json {
        let mut keep = Keep::default();
        let request = structs::request(call, "add engine queue", self.queue_of(call), &mut keep);
        let mut id = 0;
        // SAFETY: `keep` owns everything that the request refers to.
        let outcome = result(unsafe { pllm_engine_add_request(self.engine(call), &request, &mut id) });
        if outcome == json!({}) {
            let name = text(&call["add"]);
            for i in 0..u64::from(request.n.max(request.best_of)) {
                let name = if i == 0 { name.to_string() } else { format!("{name}.{i}") };
                self.name_sequence(self.engine_name(call), &name, id + i);
            }
        }
        outcome
    }

    /// Predicts admission. The record has no times.
    fn admit(&mut self, call: &Json) -> Json {
        let mut keep = Keep::default();
        let request = structs::request(call, "admit engine queue", self.queue_of(call), &mut keep);
        let mut admission: pllm_admission = sized();
        // SAFETY: `keep` owns everything that the request refers to.
        match code(unsafe { pllm_engine_predict_admission(self.engine(call), &request, &mut admission) }) {
            0 => json!({"admits": admission.admits, "fits_now": admission.fits_now, "waiting_requests": admission.waiting_requests,
                "waiting_tokens": admission.waiting_tokens}),
            code => json!({ "code": code }),
        }
    }

    fn abort(&mut self, call: &Json) -> Json {
        // SAFETY: the engine is alive.
        result(unsafe { pllm_engine_abort(self.engine(call), self.id(&call["abort"])) })
    }

    /// Steps once and records all outputs of queues that are read. Returns the number of unfinished
    /// requests.
    fn one_step(&mut self, engine: &str) -> Result<u64, i32> {
        let raw = self.engines[engine].raw;
        let mut step: pllm_step = sized();
        // SAFETY: the engine is alive.
        let code = code(unsafe { pllm_engine_step(raw, &mut step) });
        // SAFETY: as above.
        self.poll(engine, unsafe { pllm_engine_queue(raw) });
        let read: Vec<_> = self.queues.values().filter(|(_, read)| *read).map(|(queue, _)| queue.cast_const()).collect();
        read.into_iter().for_each(|queue| self.poll(engine, queue));
        if code == 0 { Ok(step.unfinished) } else { Err(code) }
    }

    fn poll(&mut self, engine: &str, queue: *const pllm_queue) {
        let mut batch = null_mut();
        // SAFETY: the queue is alive, and the batch is alive until it is freed.
        unsafe {
            match code(pllm_queue_poll(queue, 0, &mut batch)) {
                0 => {}
                // An empty queue of an engine that the script has made fail.
                PLLM_E_INTERNAL if self.engines[engine].device.is_some() => return,
                other => panic!("poll: {other}"),
            }
            for i in 0..pllm_outputs_len(batch) {
                self.collect(engine, &*pllm_outputs_get(batch, i));
            }
            pllm_outputs_free(batch);
        }
    }

    /// # Safety
    /// The output's pointers are valid.
    unsafe fn collect(&mut self, engine: &str, output: &pllm_output) {
        let name = self.engines[engine].names.get(&output.sequence);
        let name = name.cloned().unwrap_or_else(|| panic!("an output of the unknown sequence {}", output.sequence));
        // SAFETY: the caller's contract.
        unsafe { self.record.sequences.entry(name).or_default().collect(output) };
        let expected = self.exports.get_mut(&output.sequence).filter(|_| !output.sequence_state.is_null() || output.error_code != 0);
        if let Some(state) = expected.and_then(VecDeque::pop_front).filter(|_| !output.sequence_state.is_null()) {
            // SAFETY: the caller's contract.
            let bytes = unsafe { std::slice::from_raw_parts(output.sequence_state, output.sequence_state_len as usize) };
            self.states.insert(state, bytes.to_vec());
        }
    }

    fn step(&mut self, call: &Json) -> Json {
        known(call, "step engine");
        for _ in 0..call["step"].as_u64().unwrap() {
            if let Err(code) = self.one_step(self.engine_name(call)) {
                return json!({ "code": code });
            }
        }
        json!({})
    }

    /// Steps until all requests have ended.
    fn run(&mut self, call: &Json) -> Json {
        known(call, "run engine");
        for _ in 0..10_000 {
            match self.one_step(self.engine_name(call)) {
                Ok(0) => return json!({}),
                Ok(_) => {}
                Err(code) => return json!({ "code": code }),
            }
        }
        panic!("the requests do not end");
    }

    fn fork(&mut self, call: &Json) -> Json {
        known(call, "fork as at seed idle engine queue");
        let names: Vec<&str> = call["as"].as_array().unwrap().iter().map(text).collect();
        let mut how = structs::with_defaults(pllm_fork_init);
        how.n = names.len() as u32;
        how.queue = self.queue_of(call);
        if let Some(at) = call["at"].as_u64() {
            how.at = at;
        }
        if let Some(seed) = call["seed"].as_u64() {
            (how.seed, how.flags) = (seed, how.flags | PLLM_FORK_SEED);
        }
        how.flags |= if call["idle"] == true { PLLM_FORK_IDLE } else { 0 };
        let mut ids = vec![0; names.len()];
        // SAFETY: the array has one element per fork.
        let outcome = result(unsafe { pllm_sequence_fork(self.engine(call), self.id(&call["fork"]), &how, ids.as_mut_ptr()) });
        if outcome == json!({}) {
            names.iter().zip(ids).for_each(|(name, id)| self.name_sequence(self.engine_name(call), name, id));
        }
        outcome
    }

    fn append(&mut self, call: &Json) -> Json {
        known(call, "append tokens engine");
        let list = tokens(&call["tokens"]);
        // SAFETY: the list is alive during the call.
        result(unsafe { pllm_sequence_append(self.engine(call), self.id(&call["append"]), list.as_ptr(), list.len() as u64) })
    }

    fn rewind(&mut self, call: &Json) -> Json {
        known(call, "rewind len engine");
        // SAFETY: the engine is alive.
        result(unsafe { pllm_sequence_rewind(self.engine(call), self.id(&call["rewind"]), call["len"].as_u64().unwrap()) })
    }

    fn resume(&mut self, call: &Json) -> Json {
        known(call, "resume continue sampling deadline_ms free_at_end engine queue");
        let mut keep = Keep::default();
        let mut how = structs::with_defaults(pllm_resume_init);
        how.sampling = structs::sampling(&call["sampling"], &mut keep);
        how.queue = self.queue_of(call);
        how.deadline_ms = call["deadline_ms"].as_i64().unwrap_or(0);
        how.flags |= if call["continue"] == true { PLLM_RESUME_CONTINUE } else { 0 };
        how.flags &= if call["free_at_end"] == true { !PLLM_REQUEST_KEEP } else { u32::MAX };
        // SAFETY: `keep` owns everything that the struct refers to.
        result(unsafe { pllm_sequence_resume(self.engine(call), self.id(&call["resume"]), &how) })
    }

    fn release(&mut self, call: &Json) -> Json {
        known(call, "release engine");
        // SAFETY: the engine is alive.
        result(unsafe { pllm_sequence_free(self.engine(call), self.id(&call["release"])) })
    }

    fn info(&mut self, call: &Json) -> Json {
        known(call, "info engine");
        let mut info: pllm_sequence_info = sized();
        // SAFETY: the engine is alive.
        match code(unsafe { pllm_sequence_get_info(self.engine(call), self.id(&call["info"]), &mut info) }) {
            0 => json!({"len": info.len, "index": info.index, "idle": info.idle, "inexact": info.inexact}),
            code => json!({ "code": code }),
        }
    }

    fn export(&mut self, call: &Json) -> Json {
        known(call, "export as engine");
        let id = self.id(&call["export"]);
        self.exports.entry(id).or_default().push_back(text(&call["as"]).into());
        // SAFETY: the engine is alive.
        result(unsafe { pllm_sequence_export(self.engine(call), id, null()) })
    }

    fn import(&mut self, call: &Json) -> Json {
        known(call, "import as engine queue");
        let state = self.states.get(text(&call["import"])).unwrap_or_else(|| panic!("no state was exported for {call}"));
        let mut id = 0;
        let (data, len, queue) = (state.as_ptr(), state.len() as u64, self.queue_of(call));
        // SAFETY: the state is alive during the call.
        let outcome = result(unsafe { pllm_sequence_import(self.engine(call), data, len, queue, &mut id) });
        if outcome == json!({}) {
            self.name_sequence(self.engine_name(call), text(&call["as"]), id);
        }
        outcome
    }

    /// Changes one byte of an exported state.
    fn damage(&mut self, call: &Json) -> Json {
        known(call, "damage at");
        let state = self.states.get_mut(text(&call["damage"])).unwrap();
        state[call["at"].as_u64().unwrap() as usize] ^= 0x40;
        json!({})
    }

    fn pin(&mut self, call: &Json) -> Json {
        let mut keep = Keep::default();
        let pin = structs::pin(call, &mut keep);
        let mut id = 0;
        // SAFETY: `keep` owns everything that the struct refers to.
        let outcome = result(unsafe { pllm_prefix_pin(self.engine(call), &pin, &mut id) });
        self.pins.insert(text(&call["pin"]).into(), id);
        outcome
    }

    fn unpin(&mut self, call: &Json) -> Json {
        known(call, "unpin engine");
        // SAFETY: the engine is alive.
        result(unsafe { pllm_prefix_unpin(self.engine(call), self.pins[text(&call["unpin"])]) })
    }

    fn budget(&mut self, call: &Json) -> Json {
        known(call, "budget bytes max_bytes");
        let mut budget = null_mut();
        let number = |name: &str| call[name].as_u64().unwrap_or(0);
        // SAFETY: `budget` is valid for writes.
        let outcome = result(unsafe { pllm_budget_create(number("bytes"), number("max_bytes"), &mut budget) });
        self.budgets.insert(text(&call["budget"]).into(), budget);
        outcome
    }

    /// Resizes a budget, or the budget of an engine.
    fn resize(&mut self, call: &Json) -> Json {
        known(call, "resize bytes");
        let name = text(&call["resize"]);
        // SAFETY: the engine is alive.
        let engine_budget = || unsafe { pllm_engine_budget(self.engines[name].raw) };
        let budget = self.budgets.get(name).map_or_else(engine_budget, |budget| budget.cast_const());
        // SAFETY: the budget is alive.
        result(unsafe { pllm_budget_resize(budget, call["bytes"].as_u64().unwrap()) })
    }

    /// Creates a queue. Its outputs are recorded only after the call "read".
    fn queue(&mut self, call: &Json) -> Json {
        known(call, "queue capacity engine");
        let mut queue = null_mut();
        // SAFETY: the engine is alive.
        let outcome = result(unsafe { pllm_queue_create(self.engine(call), call["capacity"].as_u64().unwrap(), &mut queue) });
        self.queues.insert(text(&call["queue"]).into(), (queue, false));
        outcome
    }

    fn read(&mut self, call: &Json) -> Json {
        known(call, "read");
        self.queues.get_mut(text(&call["read"])).unwrap().1 = true;
        json!({})
    }

    /// Tokenizes a text and converts the tokens back to text.
    fn tokenize(&mut self, call: &Json) -> Json {
        known(call, "tokenize special engine");
        let mut keep = Keep::default();
        let (engine, flags) = (self.engine(call), if call["special"] == true { PLLM_TEXT_ADD_SPECIAL } else { 0 });
        let (mut list, mut bytes) = (null_mut(), null_mut());
        // SAFETY: the text is owned by `keep`, and both results are alive until they are freed.
        unsafe {
            let outcome = code(pllm_engine_tokenize(engine, keep.text(text(&call["tokenize"])), PLLM_NUL_TERMINATED, flags, &mut list));
            if outcome != 0 {
                return json!({ "code": outcome });
            }
            let (data, len) = (pllm_tokens_data(list), pllm_tokens_len(list));
            assert_eq!(code(pllm_engine_detokenize(engine, data, len, 0, &mut bytes)), 0);
            let tokens = if len == 0 { Vec::new() } else { std::slice::from_raw_parts(data, len as usize).to_vec() };
            let back = read_bytes(bytes);
            pllm_tokens_free(list);
            json!({"tokens": tokens, "back": back})
        }
    }

    fn render(&mut self, call: &Json) -> Json {
        known(call, "render engine");
        let mut keep = Keep::default();
        let mut bytes = null_mut();
        // SAFETY: the chat is owned by `keep`.
        let outcome = code(unsafe {
            pllm_engine_render_chat(self.engine(call), keep.text(&call["render"].to_string()), PLLM_NUL_TERMINATED, &mut bytes)
        });
        // SAFETY: the call succeeded.
        if outcome == 0 { json!({"prompt": unsafe { read_bytes(bytes) }}) } else { json!({ "code": outcome }) }
    }

    /// Records the statistics that the call names.
    fn stats(&mut self, call: &Json) -> Json {
        known(call, "stats engine");
        let mut stats: pllm_stats = sized();
        // SAFETY: the engine is alive.
        assert_eq!(code(unsafe { pllm_engine_get_stats(self.engine(call), &mut stats) }), 0);
        let counts = [
            ("waiting", stats.waiting),
            ("running", stats.running),
            ("blocks_used", stats.blocks_used),
            ("blocks_cached", stats.blocks_cached),
            ("prompt_tokens", stats.prompt_tokens),
            ("generated_tokens", stats.generated_tokens),
            ("preemptions", stats.preemptions),
            ("preemptions_swapped", stats.preemptions_swapped),
            ("swapped", stats.swapped),
            ("swap_failures", stats.swap_failures),
            ("finished_stop", stats.finished_stop),
            ("finished_length", stats.finished_length),
            ("finished_abort", stats.finished_abort),
            ("finished_error", stats.finished_error),
            ("finished_deadline", stats.finished_deadline),
            ("admission_rejections", stats.admission_rejections),
            ("paused", stats.paused),
            ("idle", stats.idle),
            ("blocks_copied", stats.blocks_copied),
            ("prefix_hits", stats.prefix_hits),
            ("prompt_tokens_cached", stats.prompt_tokens_cached),
            ("steps_failed", stats.steps_failed),
            ("blocks_out_of_window", stats.blocks_out_of_window),
        ];
        let named = call["stats"].as_array().unwrap().iter().map(|name| {
            let (_, count) = counts.iter().find(|(known, _)| known == name).unwrap_or_else(|| panic!("unknown count {name}"));
            (text(name).to_string(), json!(count))
        });
        Json::Object(named.collect())
    }

    fn health(&mut self, call: &Json) -> Json {
        known(call, "health engine");
        // SAFETY: the engine is alive.
        let code = code(unsafe { pllm_engine_health(self.engine(call)) });
        assert_eq!(text(&call["health"]), if code == 0 { "works" } else { "failed" });
        json!({ "code": code })
    }

    fn device(&self, call: &Json) -> &Device {
        self.engines[self.engine_name(call)].device.as_ref().expect("the call needs an engine with \"device\"")
    }

    fn fail(&mut self, call: &Json) -> Json {
        known(call, "fail engine");
        self.device(call).fail(&call["fail"]);
        json!({})
    }

    fn advance(&mut self, call: &Json) -> Json {
        known(call, "advance engine");
        self.device(call).advance(call["advance"].as_u64().unwrap())
    }
}

/// # Safety
/// `bytes` belongs to this function and contains text.
unsafe fn read_bytes(bytes: *mut pllm_bytes) -> String {
    // SAFETY: the caller's contract.
    unsafe {
        let len = pllm_bytes_len(bytes) as usize;
        let data = if len == 0 { &[] } else { std::slice::from_raw_parts(pllm_bytes_data(bytes).cast::<u8>(), len) };
        let text = String::from_utf8(data.to_vec()).expect("text is UTF-8");
        pllm_bytes_free(bytes);
        text
    }
}
