//! Random API calls of a host, and the outputs that the ledger expects from them.

use std::sync::Arc;

use pagedllm::engine::{Continue, Fork, LogitsHook, Prompt, Request, Resume, SequenceInfo};
use pagedllm::types::options::{Grammar, Mirostat, OutputKind, SamplingParams};

use super::script::Script;
use super::{AddedRequest, ExpectedEnd, Export, Host, LAGGING, Name, STATES, Sequence, Trace, poll, refused};

/// Returns a hook whose edits depend on the tokens alone.
fn hook() -> LogitsHook {
    Arc::new(|_, tokens, logits| logits[(tokens.iter().sum::<u32>() % 256) as usize] += 9.0)
}

impl Trace {
    /// Returns a random sequence that exists.
    pub fn some_sequence(&mut self) -> Option<(Name, SequenceInfo)> {
        let known = |&name: &Name| Some((name, self.hosts[name.0].engine.sequence(name.1).ok()?));
        let all: Vec<_> = self.sequences.keys().filter_map(known).collect();
        (!all.is_empty()).then(|| all[self.random.below(all.len())])
    }

    pub fn some_queue(&mut self, host: usize) -> usize {
        let queues = &self.hosts[host].queues;
        let open: Vec<usize> = (1..queues.len()).filter(|&queue| queues[queue].is_some()).collect();
        open[self.random.below(open.len())]
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.random.below(n) == 0
    }

    pub fn some_text(&mut self) -> &'static str {
        ["Tell me a story about a dog.", "Count from 1.", "Give JSON for Anna, 31, Paris.", "Say hello in Japanese.", "Once"]
            [self.random.below(5)]
    }

    pub fn some_params(&mut self) -> SamplingParams {
        let random = &mut self.random;
        let grammars = [Grammar::Regex("[a-zA-Z ,.]{2,40}".into()), Grammar::JsonObject];
        let uses_mirostat = random.below(8) == 0;
        SamplingParams {
            temperature: [0.0, 0.7, 1.0, 1.3][if uses_mirostat { 2 } else { random.below(4) }],
            mirostat: uses_mirostat.then_some(Mirostat { tau: 3.0, eta: 0.2 }),
            repetition_penalty: [1.0, 1.2][random.below(2)],
            presence_penalty: [0.0, 0.5][random.below(2)],
            seed: Some(random.next()),
            max_tokens: Some(random.below(25)),
            min_tokens: [0, 0, 1, 4][random.below(4)],
            ignore_eos: random.below(3) == 0,
            stop_token_ids: if random.below(4) == 0 { vec![70, 74, 264, 287] } else { vec![] },
            stop: [&[][..], &[], &["the", " dog"], &["a d", ", 3", "e."]][random.below(4)].iter().map(|&stop| stop.into()).collect(),
            include_stop: random.below(3) == 0,
            logprobs: [None, Some(0), Some(2)][random.below(3)],
            prompt_logprobs: [None, None, Some(1)][random.below(3)],
            echo: random.below(5) == 0,
            output: [OutputKind::Delta, OutputKind::Cumulative, OutputKind::Final][random.below(3)],
            grammar: if random.below(6) == 0 { Some(grammars[random.below(2)].clone()) } else { None },
            ..SamplingParams::default()
        }
    }

    pub fn script(&mut self, script: Script) -> usize {
        self.scripts.push(script);
        self.scripts.len() - 1
    }

    pub fn expect_end(&mut self, (host, sequence): Name, info: SequenceInfo, expected: &Sequence) {
        let Sequence { queue, user_data, .. } = *expected;
        self.expected_ends.push(ExpectedEnd { host, request: info.request, sequence: Some(sequence), index: info.index, queue, user_data });
    }

    pub fn add(&mut self, host: usize) {
        let text = format!("<s><|user|>\n{}<|end|>\n<|assistant|>\n", self.some_text());
        let prompt = self.hosts[host].engine.text().unwrap().encode(&text, false).unwrap();
        let mut request = Request::new(Prompt::Tokens(prompt.clone()), self.some_params());
        request.hook = self.one_in(6).then(hook);
        let script = self.script(Script::new(prompt.len(), request.sampling.echo));
        self.add_request_to_some_queue(host, request, script);
    }

    /// Adds an earlier request again, with another output kind.
    pub fn repeat_request(&mut self, host: usize) {
        let Some(last) = self.added.len().checked_sub(1) else { return };
        let added = &self.added[self.random.below(last + 1)];
        let (mut request, script) = (added.request.clone(), added.sequence.script);
        request.sampling.output = self.some_params().output;
        self.add_request_to_some_queue(host, request, script);
    }

    pub fn add_request_to_some_queue(&mut self, host: usize, mut request: Request, script: usize) {
        let (queue, user_data) = (self.some_queue(host), self.random.next());
        (request.n, request.best_of, request.keep) = (1, None, !self.one_in(3));
        match self.random.below(6) {
            0 => request.n = 3,
            1 => (request.n, request.best_of) = (2, Some(4)),
            _ => {}
        }
        request.user_data = user_data;
        let Host { engine, queues, .. } = &self.hosts[host];
        let Some(id) = refused(engine.add_request_to(queues[queue].as_ref().unwrap(), request.clone())) else { return };
        let mut params = request.sampling.clone();
        if request.best_of.is_some() {
            params.output = OutputKind::Final;
        }
        self.log(format!("{host}: add {id} x {} of {:?}, keep {}, {params:?}", request.n, request.best_of, request.keep));
        self.hosts[host].has_pending_calls = true;
        let expected = |index| ExpectedEnd { host, request: id, sequence: None, index, queue, user_data };
        self.expected_ends.extend((0..request.n).map(expected));
        let sequence = Sequence {
            script,
            params,
            hooked: request.hook.is_some(),
            queue,
            user_data,
            ranked: request.best_of.is_some(),
            text_flushed: false,
        };
        self.sequences.insert((host, id.sequence(0)), sequence.clone());
        let samples = request.best_of.unwrap_or(request.n);
        self.added.push(AddedRequest { name: (host, id.sequence(0)), request, samples, sequence });
    }

    /// Applies pending calls and reads all outputs of a sequence before a call changes its script.
    pub fn step_and_read(&mut self, (host, id): Name) -> Option<SequenceInfo> {
        if self.hosts[host].has_pending_calls {
            self.step(host);
        }
        self.read(host, LAGGING);
        while self.may_wait_for_mask((host, id)) {
            self.step(host);
            self.read(host, LAGGING);
        }
        self.hosts[host].engine.sequence(id).ok()
    }

    /// Returns whether calls for a sequence, or the output of its last token, may wait for the mask
    /// of its grammar.
    fn may_wait_for_mask(&mut self, (host, id): Name) -> bool {
        if self.sequences[&(host, id)].params.grammar.is_none() {
            return false;
        }
        // An export follows all earlier calls.
        let last = self.hosts[host].engine.create_queue(64).unwrap();
        let exported = refused(self.hosts[host].engine.export(id, Some(&last))).is_some();
        while exported && poll(&last).is_empty() {
            self.step(host);
            self.read(host, LAGGING);
        }
        let info = self.hosts[host].engine.sequence(id);
        info.is_ok_and(|info| !info.idle && self.lengths.get(&(host, id)) != Some(&info.len))
    }

    pub fn resume(&mut self, name: Name, info: SequenceInfo) {
        self.read(name.0, LAGGING);
        let (queue, user_data) = (self.some_queue(name.0), self.random.next());
        let params = SamplingParams { prompt_logprobs: None, echo: false, ..self.some_params() };
        let hook = self.one_in(6).then(hook);
        let hooked = hook.is_some();
        let Host { engine, queues, .. } = &self.hosts[name.0];
        let how = Resume {
            keep: self.random.below(4) > 0,
            queue: queues[queue].as_ref(),
            user_data: Some(user_data),
            hook,
            ..Resume::new(params.clone())
        };
        if refused(engine.resume(name.1, how)).is_some() {
            self.log(format!("{name:?}: resume, {params:?}"));
            self.hosts[name.0].has_pending_calls = true;
            let script = self.script(Script::new(info.len, false));
            let sequence = Sequence { script, params, hooked, queue, user_data, ranked: false, text_flushed: false };
            self.expect_end(name, info, &sequence);
            self.sequences.insert(name, sequence);
        }
    }

    pub fn continue_sequence(&mut self, name: Name, info: SequenceInfo) {
        let mut sequence = self.sequences[&name].clone();
        let (moves, keep) = (self.one_in(2), !self.one_in(4));
        if moves {
            (sequence.queue, sequence.user_data) = (self.some_queue(name.0), self.random.next());
        }
        let Host { engine, queues, .. } = &self.hosts[name.0];
        let queue = if moves { queues[sequence.queue].as_ref() } else { None };
        // An imported sequence has no hook.
        let hook = sequence.hooked.then(hook);
        if refused(
            engine
                .continue_sequence(name.1, Continue { keep, queue, user_data: moves.then_some(sequence.user_data), hook, deadline: None }),
        )
        .is_some()
        {
            self.log(format!("{name:?}: continue, keep {keep}, moves {moves}"));
            self.hosts[name.0].has_pending_calls = true;
            self.expect_end(name, info, &sequence);
            self.sequences.insert(name, sequence);
        }
    }

    pub fn fork(&mut self, name: Name, info: SequenceInfo) {
        let parent = self.sequences[&name].clone();
        let at = (!self.one_in(3)).then(|| 1 + self.random.below(info.len));
        let (n, idle, seed) = (1 + self.random.below(2), self.one_in(3), self.one_in(3).then(|| self.random.next()));
        let moves = self.one_in(2).then(|| (self.some_queue(name.0), self.random.next()));
        let Host { engine, queues, .. } = &self.hosts[name.0];
        let queue = moves.and_then(|(queue, _)| queues[queue].as_ref());
        let how = Fork { at, idle, seed, queue, user_data: moves.map(|(_, user_data)| user_data) };
        let Some(children) = refused(engine.fork(name.1, n, &how)) else { return };
        self.log(format!("{name:?}: fork {children:?} at {at:?}, idle {idle}, seed {seed:?}, moves {}", moves.is_some()));
        for id in children {
            let child = (name.0, id);
            let mut sequence = Sequence { ranked: false, ..parent.clone() };
            (sequence.queue, sequence.user_data) = moves.unwrap_or((parent.queue, parent.user_data));
            if at.is_some_and(|at| at < info.len) {
                self.cut(&mut sequence, at.unwrap_or(info.len));
            }
            if seed.is_some() {
                let at = at.unwrap_or(info.len);
                let reseeded = self.scripts[sequence.script].diverges(at);
                sequence.script = self.script(Script { foreign: at, origin: None, ..reseeded });
            }
            match idle || info.idle {
                true => assert!(self.pending_forks.insert(child, sequence.queue).is_none() && self.unseen.insert(child)),
                false => self.expect_end(child, SequenceInfo { request: id.own_request(), index: 0, ..info }, &sequence),
            }
            self.sequences.insert(child, sequence);
        }
    }

    /// Restores the script that the sequence had when it first had `len` tokens.
    pub fn cut(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.text_flushed = false;
        while let Some((script, _)) = self.scripts[sequence.script].origin.filter(|&(_, at)| len <= at) {
            sequence.script = script;
        }
        let script = &self.scripts[sequence.script];
        if len < script.prompt_len {
            sequence.script = self.script(Script::new(len, script.echo));
        } else if len < script.foreign {
            sequence.script = self.script(Script { foreign: len, ..script.diverges(len) });
        }
    }

    pub fn append(&mut self, name: Name) {
        let Some(info) = self.step_and_read(name) else { return };
        let text = self.some_text();
        let Host { engine, changed, .. } = &mut self.hosts[name.0];
        let mut tokens = engine.text().unwrap().encode(text, false).unwrap();
        tokens.truncate(1 + self.random.below(5));
        if refused(engine.append(name.1, tokens.clone())).is_some() {
            changed.insert(name.1);
            self.log(format!("{name:?}: append {tokens:?} after {}", info.len));
            let script = self.sequences[&name].script;
            let mut appended = self.scripts[script].diverges(info.len);
            (appended.foreign, appended.origin) = (info.len + tokens.len(), Some((script, info.len)));
            let appended = self.script(appended);
            self.sequences.get_mut(&name).unwrap().script = appended;
        }
    }

    pub fn rewind(&mut self, name: Name, info: SequenceInfo) {
        // A rewind to a position where the sequence has another script is rare, and needs all
        // earlier outputs.
        let script = &self.scripts[self.sequences[&name].script];
        let same_script = script.prompt_len.max(script.foreign);
        let leaves_script = self.one_in(4) || info.len < same_script;
        let Some(info) = (if leaves_script { self.step_and_read(name) } else { Some(info) }) else { return };
        let min_len = if leaves_script { 1 } else { same_script };
        let len = min_len + self.random.below(info.len + 1 - min_len);
        let Host { engine, changed, .. } = &mut self.hosts[name.0];
        engine.rewind(name.1, len).unwrap();
        changed.insert(name.1);
        self.log(format!("{name:?}: rewind to {len} of {}", info.len));
        let mut sequence = self.sequences[&name].clone();
        self.cut(&mut sequence, len);
        self.sequences.insert(name, sequence);
    }

    pub fn export(&mut self, name: Name, info: SequenceInfo) {
        let Host { engine, queues, exports, .. } = &mut self.hosts[name.0];
        engine.export(name.1, queues[STATES].as_ref()).unwrap();
        exports.push_back(Export { name, len: info.len, sequence: self.sequences[&name].clone() });
        self.log(format!("{name:?}: export at {}", info.len));
    }

    pub fn import(&mut self, export: Export, state: &[u8]) {
        let host = self.random.below(2);
        let queue = self.some_queue(host);
        let Host { engine, queues, .. } = &self.hosts[host];
        let id = engine.import(queues[queue].as_ref().unwrap(), state).unwrap_or_else(|error| panic!("{:?}: {error}", export.name));
        assert_eq!(engine.sequence(id).unwrap().len, export.len, "an imported sequence is as long as the exported one");
        let sequence = Sequence { queue, user_data: 0, ranked: false, text_flushed: false, ..export.sequence };
        self.log(format!("{host}: import {id} of {:?}", export.name));
        self.sequences.insert((host, id), sequence);
    }

    pub fn abort(&mut self, name: Name, info: SequenceInfo) {
        if refused(self.hosts[name.0].engine.abort(info.request)).is_some() {
            self.log(format!("{}: abort {}", name.0, info.request));
            self.hosts[name.0].has_pending_calls = true;
        }
    }

    pub fn free(&mut self, name: Name) {
        self.log(format!("{name:?}: free"));
        self.hosts[name.0].engine.free(name.1).unwrap();
        self.sequences.remove(&name);
    }

    /// Frees a queue. The requests that write to it end without an output.
    pub fn free_queue(&mut self, host: usize) {
        let queue = self.some_queue(host);
        if queue == LAGGING {
            return;
        }
        self.log(format!("{host}: free queue {queue}"));
        let Host { engine, queues, has_pending_calls, .. } = &mut self.hosts[host];
        *has_pending_calls = true;
        queues[queue] = None;
        queues.push(Some(engine.create_queue(64).unwrap()));
        self.expected_ends.retain(|expected| (expected.host, expected.queue) != (host, queue));
        self.pending_forks.retain(|name, pending_queue| (name.0, *pending_queue) != (host, queue));
        self.missing.retain(|name| self.pending_forks.contains_key(name));
    }
}
