//! The core of the engine: one step from its inputs to its outputs.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::ModelInfo;
use super::admission_snapshot::AdmissionSnapshot;
use super::device::Device;
use super::lifecycle::{Lifecycle, ModelIdentity};
use super::pool_lease::PoolLease;
use super::recovery::{self, RETRY_TIMEOUT, Recovery};
use super::sampling::Sampling;
use super::shared::{Published, Shared};
use super::snapshot::EngineSnapshot;
use super::step_inputs::{EndedStep, Inputs, StepInputs};
use super::telemetry::Telemetry;
use super::transfers::{StoreTransfers, SwapFile, Transfers};
use crate::error::{Error, Result};
use crate::executor::{Executor, InFlightStep};
use crate::kv::connector::Progress;
use crate::memory::budget::Lease;
use crate::observability::stats::{Stats, StepReport};
use crate::observability::trace::{Phase, Trace};
use crate::scheduler::simulate::StepLoad;
use crate::scheduler::{Costs, Scheduler, StepPlan};
use crate::sys::float::StandardMode;
use crate::sys::quiet;
use crate::types::SeqId;
use crate::types::options::{EngineOptions, Preemption};
use crate::types::outputs::{FinishReason, Output};

/// The state of the stepping thread, and the state that it shares with other threads.
pub struct EngineCore {
    /// Source of the inputs. With the executor of the device, all that a journal records.
    source: Box<dyn Inputs>,
    /// Inputs of the current step.
    inputs: StepInputs,
    lifecycle: Lifecycle,
    sampling: Sampling,
    device: Device,
    /// Launched steps, the oldest first.
    in_flight: VecDeque<LaunchedStep>,
    pool: PoolLease,
    /// Groups are identified by their first sequence.
    recovery: Recovery<SeqId>,
    shared: Shared,
}

/// A step that the device computes.
struct LaunchedStep {
    plan: StepPlan,
    ticket: InFlightStep,
    load: StepLoad,
    launched_at: Duration,
    /// Whether its sampling has been started, which needs the tokens of the previous step.
    prepared: Result<()>,
}

impl EngineCore {
    pub fn new(
        scheduler: Box<Scheduler>,
        (source, executor): (Box<dyn Inputs>, Box<dyn Executor>),
        (store, swap_file, journals): (Option<StoreTransfers>, Option<SwapFile>, bool),
        lease: Arc<Lease>,
        info: &ModelInfo,
        options: &EngineOptions,
        shared: Shared,
    ) -> Result<EngineCore> {
        let max_seqs = options.max_seqs;
        let trace = options.trace_path.as_deref().map(Trace::create).transpose()?;
        let telemetry = Box::new(Telemetry::new(shared.clock.clone(), trace));
        let model = ModelIdentity { fingerprint: info.fingerprint, isa: info.isa_name(), max_len: info.memory.max_model_len };
        let depth = executor.depth();
        let mut core = EngineCore {
            source,
            inputs: StepInputs::default(),
            lifecycle: Lifecycle::new(
                scheduler,
                model,
                (shared.table.clone(), shared.text.clone()),
                telemetry,
                Box::new(Transfers::new(shared.completions.clone(), executor.max_transfer_bytes(), store)),
                max_seqs,
                journals,
            )?,
            sampling: Sampling::new(info.vocab_size, max_seqs, executor.sampling_limits())?,
            in_flight: VecDeque::new(),
            device: Device::new(executor, swap_file, shared.clock.clone()),
            pool: PoolLease::new(lease),
            recovery: Recovery::new(max_seqs)?,
            shared,
        };
        core.device.limit_moves(Costs::default(), &mut core.lifecycle.scheduler);
        core.in_flight.try_reserve_exact(depth)?;
        core.lifecycle.scheduler.reserve_steps(depth)?;
        if core.device.executor.sampling_limits().is_none() {
            core.lifecycle.scheduler.divide_decodes(depth);
        }
        core.shared.admission().scheduler.reserve(max_seqs)?;
        Ok(core)
    }

    /// Runs one step.
    pub fn step(&mut self) -> Result<StepReport> {
        // The check needs the lock: a thread that waited for the lock while another one failed must
        // not step.
        self.shared.table.check()?;
        let (_mode, _stepping) = (StandardMode::enter(), self.shared.snapshots.begin_step());
        // The scheduler knows no other durations.
        let costs = (self.lifecycle.scheduler.preemption() != Preemption::Recompute).then(|| self.device.costs());
        self.source.collect(costs, &mut self.inputs);
        self.lifecycle.masks.read_finished(&mut *self.source, &mut self.inputs.finished_masks);
        self.lifecycle.delivery.begin_step();
        self.lifecycle.telemetry.step_begins(self.inputs.now);
        let result = catch_unwind(AssertUnwindSafe(|| self.advance()));
        let result = result.unwrap_or_else(|panic| Err(self.fail(panic)));
        let stats = self.publish();
        self.source.end_step(&EndedStep { result: &result, stats: &stats, outputs: self.lifecycle.delivery.digests() });
        self.lifecycle.telemetry.step_ends(&result, &stats);
        if self.shared.snapshots.is_wanted() && !self.has_failed() {
            self.shared.snapshots.answer(|snapshot| self.write_snapshot(snapshot));
        }
        let table = &self.shared.table;
        let Lifecycle { transfers, masks, forks, .. } = &self.lifecycle;
        let unfinished = table.unfinished() + table.left_commands() + (transfers.pending() + masks.deferring() + forks.pending()) as u64;
        result.map(|report| StepReport { unfinished, ..report })
    }

    /// Runs one iteration. Everything that happens to a request happens here, in this order.
    /// Commits what can be computed. The rest stays unchanged.
    fn advance(&mut self) -> Result<StepReport> {
        self.apply_commands();
        self.lifecycle.end_overdue(self.inputs.now);
        self.resize_pool(true);
        // There may be many paused groups.
        if self.inputs.has_new_space() {
            self.lifecycle.scheduler.recheck_paused();
        }
        self.lifecycle.telemetry.end_phase(Phase::Commands);
        let result = self.launch_all().and_then(|()| self.finish_oldest());
        let result = result.or_else(|error| match self.device.executor.is_lost() {
            true => Err(error),
            false => self.recover(error),
        });
        self.lifecycle.finish_exports_in_step();
        self.lifecycle.end_undeliverable();
        match &result {
            Ok(_) => self.recovery.record_success(),
            Err(error) if self.device.executor.is_lost() => self.lose_device(error),
            Err(error) => self.record_failure(error),
        }
        result
    }

    fn apply_commands(&mut self) {
        let StepInputs { now, commands, costs, finished_transfers, disk_transfers, finished_masks, lookup_progress, store_room, .. } =
            &mut self.inputs;
        if let Some(costs) = *costs {
            self.lifecycle.scheduler.set_costs(costs);
            self.device.limit_moves(costs, &mut self.lifecycle.scheduler);
        }
        self.lifecycle.scheduler.begin_step(now.as_micros() as u64);
        self.device.complete_disk_transfers(disk_transfers, *now, &mut self.lifecycle.scheduler);
        self.lifecycle.complete_transfers(finished_transfers);
        self.lifecycle.complete_masks(finished_masks, &mut self.device);
        self.lifecycle.forks.begin_step();
        self.lifecycle.continue_forks(&mut self.device);
        self.lifecycle.begin_store_transfers(lookup_progress, *store_room, *now);
        self.lifecycle.apply_all(commands, &mut self.device);
        self.lifecycle.copy_transfers(&mut self.device);
        self.lifecycle.copy_store_transfers(&mut self.device);
        self.lifecycle.apply_released(&mut self.device);
        self.lifecycle.remove_lost_pins();
    }

    /// Resizes the pool as the lease allows. `steps` is set if a step starts now.
    pub fn resize_pool(&mut self, steps: bool) {
        self.shared.wants_check.store(false, SeqCst);
        let need = PoolLease::need(&self.lifecycle.scheduler, steps);
        let blocks = self.source.pool_blocks(need);
        if blocks < need.pool {
            // A shrink moves blocks, so the steps that use them are discarded and recomputed.
            self.discard_in_flight(None);
        }
        self.pool.resize(blocks, &mut self.lifecycle.scheduler, &mut self.device);
    }

    /// Launches steps until as many are in flight as the device allows. An error of a later step
    /// leaves the earlier one to finish. The next step tries again.
    fn launch_all(&mut self) -> Result<()> {
        while self.in_flight.len() < self.device.executor.depth() {
            let plan = self.schedule(None);
            self.lifecycle.telemetry.end_phase(Phase::Schedule);
            let Some(plan) = plan else { break };
            if let Err(error) = self.launch(plan) {
                return if self.in_flight.is_empty() { Err(error) } else { Ok(()) };
            }
        }
        Ok(())
    }

    /// Plans the next step, and makes the transfers between the tiers that it needs. If a transfer
    /// back to the device fails, the affected sequences are recomputed, and the step is planned
    /// again.
    fn schedule(&mut self, groups: Option<&[SeqId]>) -> Option<StepPlan> {
        let (Lifecycle { scheduler, live, masks, transfers, .. }, inputs, device) = (&mut self.lifecycle, &self.inputs, &mut self.device);
        let is_ready = |seq| {
            let sequence = live.deliverer_of(seq);
            sequence.is_none_or(|sequence| {
                !inputs.is_full(sequence.generation.sender.id())
                    && !masks.is_late(sequence.request)
                    && !transfers.has_lookup(sequence.request)
            })
        };
        loop {
            let mut plan = match groups {
                Some(groups) => scheduler.schedule_among(groups, is_ready),
                None => scheduler.schedule(is_ready),
            };
            let roll_back = |scheduler: &mut Scheduler| plan.take().into_iter().for_each(|plan| scheduler.rollback(plan));
            if device.move_blocks(scheduler, roll_back) {
                return plan;
            }
        }
    }

    /// Starts to compute a plan. If this fails, the plan is rolled back.
    fn launch(&mut self, mut plan: StepPlan) -> Result<()> {
        let (load, launched_at) = (StepLoad::for_plan(&plan), self.shared.clock.now());
        self.shared.admission().step = Some((load, launched_at));
        let is_first = self.in_flight.is_empty();
        if is_first {
            self.lifecycle.masks.start(&plan, &mut self.lifecycle.live);
        }
        let ticket = self.device.executor.submit(&plan.batch);
        if is_first {
            // Collected even after an error, since a failed step is retried.
            self.lifecycle.collect_masks(&mut *self.source, &mut plan);
        }
        match ticket {
            Ok(ticket) => self.in_flight.push_back(LaunchedStep { plan, ticket, load, launched_at, prepared: Ok(()) }),
            Err(error) => {
                self.roll_back(plan);
                return Err(error);
            }
        }
        if is_first {
            self.prepare_sampling();
        }
        Ok(())
    }

    /// Starts the sampling of the oldest step in flight. All tokens before it are known.
    fn prepare_sampling(&mut self) {
        let Some(LaunchedStep { plan, ticket, prepared, .. }) = self.in_flight.front_mut() else { return };
        let Lifecycle { scheduler, live, .. } = &mut self.lifecycle;
        let planned = self.sampling.plan_on_device(plan, scheduler, live);
        *prepared = planned.and_then(|on_device| {
            scheduler.set_device_samples(plan);
            self.device.executor.sample(ticket, on_device)
        });
    }

    /// Waits for the oldest step in flight and commits it. If it fails, all steps in flight are
    /// rolled back, and `recovery.groups` are its groups.
    fn finish_oldest(&mut self) -> Result<StepReport> {
        let Some(mut step) = self.in_flight.pop_front() else {
            return Ok(StepReport { paused: self.lifecycle.scheduler.paused() as u64, ..StepReport::default() });
        };
        self.lifecycle.scheduler.mark_stale(&mut step.plan);
        if let Err(error) = self.wait(&step.plan, step.ticket, step.prepared) {
            self.discard_in_flight(Some(&error));
            self.roll_back(step.plan);
            return Err(error);
        }
        let report = self.report(&step.plan);
        self.lifecycle.start(&step.plan, self.inputs.now);
        self.lifecycle.commit(step.plan, &mut self.sampling.step, &mut *self.source);
        self.device.record_step(step.load, step.launched_at);
        self.prepare_next();
        self.lifecycle.telemetry.end_phase(Phase::Commit);
        Ok(report)
    }

    /// Starts the sampling of the step that was launched with placeholders, which are known now.
    fn prepare_next(&mut self) {
        let Some(LaunchedStep { plan, .. }) = self.in_flight.front_mut() else { return };
        let Lifecycle { scheduler, live, masks, .. } = &mut self.lifecycle;
        scheduler.mark_stale(plan);
        masks.start(plan, live);
        self.lifecycle.collect_masks(&mut *self.source, plan);
        self.prepare_sampling();
    }

    /// Waits for a step and samples its tokens. Changes no lengths.
    fn wait(&mut self, plan: &StepPlan, ticket: InFlightStep, prepared: Result<()>) -> Result<()> {
        let Lifecycle { scheduler, live, telemetry, .. } = &mut self.lifecycle;
        let output = self.device.executor.wait(ticket);
        telemetry.end_phase(Phase::Run);
        let output = prepared.and(output)?;
        self.sampling.sample(plan, output, scheduler, live)?;
        telemetry.end_phase(Phase::Decide);
        Ok(())
    }

    /// Discards all steps in flight, because an older one has failed with `error`, or because
    /// blocks move.
    fn discard_in_flight(&mut self, error: Option<&Error>) {
        self.device.executor.discard(error);
        while let Some(newest) = self.in_flight.pop_back() {
            self.lifecycle.scheduler.rollback(newest.plan);
        }
    }

    /// Reverts a failed step. No length has changed.
    fn roll_back(&mut self, plan: StepPlan) {
        let Lifecycle { scheduler, telemetry, .. } = &mut self.lifecycle;
        let groups = &mut self.recovery.groups;
        groups.clear();
        let current = plan.sequences.iter().filter(|part| !part.is_stale);
        groups.extend(current.map(|part| scheduler.members(part.seq).next().unwrap_or(part.seq)));
        groups.dedup();
        telemetry.counts.steps_failed += 1;
        scheduler.rollback(plan);
        telemetry.end_phase(Phase::Commit);
    }

    /// Computes a step of these groups (by their first sequence) alone.
    fn attempt(&mut self, groups: &[SeqId]) -> Result<StepReport> {
        let plan = self.schedule(Some(groups));
        self.lifecycle.telemetry.end_phase(Phase::Schedule);
        plan.map_or(Ok(()), |plan| self.launch(plan)).and_then(|()| self.finish_oldest())
    }

    /// Computes the groups of a failed step separately. If some succeed, those that failed alone
    /// end with their error.
    fn recover(&mut self, error: Error) -> Result<StepReport> {
        let groups = std::mem::take(&mut self.recovery.groups);
        let mut done = StepReport::default();
        let bisection = recovery::bisect(&groups, error, |some| {
            let report = self.attempt(some)?;
            done.prefill_tokens += report.prefill_tokens;
            done.decode_tokens += report.decode_tokens;
            done.sequences += report.sequences;
            done.paused = report.paused;
            Ok(report.sequences)
        });
        self.recovery.groups = groups;
        if bisection.computed == 0 {
            return Err(bisection.error);
        }
        bisection.failing.into_iter().for_each(|(group, error)| self.lifecycle.end_group(group, &error));
        Ok(done)
    }

    /// Records a step in which no group could be computed. After the retry timeout, ends the groups
    /// that have failed since.
    fn record_failure(&mut self, error: &Error) {
        let Some(latest) = self.recovery.record_failure(self.inputs.now) else { return };
        let error =
            Error::new(error.code(), format!("no step with this request could be computed for {RETRY_TIMEOUT:?}: {}", error.message()));
        let groups = self.recovery.groups.iter().filter(|group| **group <= latest);
        groups.for_each(|&group| self.lifecycle.end_group(group, &error));
    }

    pub fn has_failed(&self) -> bool {
        self.shared.table.check().is_err()
    }

    /// Handles a defect: the state of the core may be inconsistent, so all requests end and later
    /// calls return the error.
    fn fail(&mut self, panic: Box<dyn Any + Send>) -> Error {
        let what = quiet::panic_message(&*panic);
        let error = Error::internal(format!("the engine has failed ({what}); free it and create another"));
        self.lifecycle.end_all(&error, |output| output.failed(error.clone()));
        error
    }

    /// Handles the loss of the device: all requests end with the error, and later calls return it.
    fn lose_device(&mut self, error: &Error) {
        self.lifecycle.end_all(error, |output| output.failed(error.clone()));
    }

    /// Handles a defect outside of a step, using only the table.
    pub fn fail_without_core(&self) {
        let table = &self.shared.table;
        let error = Error::internal("the engine's thread has failed; free the engine and create another");
        table.fail(&error, |sender, last| {
            sender.push_last(&mut last.failed(error.clone()));
            sender.notify();
        });
        table.close_queues(&error);
    }

    /// Closes the engine: all requests end, and all readers are notified.
    pub fn close(&mut self) {
        let error = Error::closed("the engine has been freed");
        self.lifecycle.end_all(&error, |output| Output { finish: Some(FinishReason::Abort), error: Some(error.clone()), ..output });
        self.source.close();
        self.publish();
    }

    /// Checks the lease on behalf of another engine, while this engine does not step.
    pub fn answer_caller(&mut self) {
        if !self.has_failed() {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.resize_pool(false))) {
                self.fail(panic);
            }
            self.publish();
        }
        if self.has_failed() {
            self.release_memory();
        }
    }

    /// Returns all memory of a failed engine.
    fn release_memory(&mut self) {
        self.shared.wants_check.store(false, SeqCst);
        // After a defect the executor may be inconsistent. If its memory cannot be freed, the lease
        // stays.
        if let Ok(Ok(())) = catch_unwind(AssertUnwindSafe(|| self.device.executor.shrink(&[], 0))) {
            self.pool.release_all();
        }
    }

    /// If the last step had no sequence because masks or disks are late, or if transfers are all
    /// that the engine has to do, waits until another step can continue. Returns whether to run
    /// that step.
    pub fn await_completion(&mut self) -> bool {
        let Lifecycle { scheduler, transfers, masks, delivery, forks, .. } = &self.lifecycle;
        let has_groups = scheduler.running() + scheduler.waiting() + scheduler.paused() > 0;
        // The thread of the call may be the one that reads outputs.
        let host_can_act = delivery.has_delivered() || !self.inputs.full_queues().is_empty() || !masks.released.is_empty();
        let waits_for_disk = self.device.waits_for_disk() && (scheduler.waits_for_moves() || transfers.waits_for_moves);
        let others_are_late = masks.has_waiting(scheduler) || transfers.has_lookups() || waits_for_disk;
        let must_wait = (others_are_late && !host_can_act) || (!has_groups && transfers.pending() > 0);
        must_wait && !self.can_move() && forks.pending() == 0 && self.source.await_completion(self.max_sleep())
    }

    /// Returns whether the next step continues moves between the tiers that do not wait for a disk.
    fn can_move(&self) -> bool {
        self.lifecycle.scheduler.waits_for_moves() && !self.device.waits_for_disk()
    }

    /// Returns how long the engine may sleep: until the first deadline or the end of a pin, and not
    /// at all while there are blocks to copy or commands to apply.
    pub fn max_sleep(&self) -> Option<Duration> {
        let Lifecycle { transfers, masks, forks, .. } = &self.lifecycle;
        let has_commands = !masks.released.is_empty() || forks.pending() > 0;
        let can_copy = transfers.progress(self.device.waits_for_disk()) == Progress::Copying;
        if can_copy || self.can_move() || has_commands {
            return Some(Duration::ZERO);
        }
        let deadlines = self.lifecycle.live.deadlines.first().into_iter().chain(transfers.next_lookup_deadline());
        let first = self.shared.table.next_expiry().into_iter().chain(deadlines).min()?;
        Some(first.saturating_sub(self.shared.clock.now()))
    }

    /// Returns the number of commands that have waited for a mask, an import or a fork and are
    /// applied next. For tests.
    #[cfg(test)]
    pub fn released_commands(&self) -> usize {
        self.lifecycle.masks.released.len()
    }

    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check_invariants(&self) {
        let Lifecycle { scheduler, delivery, masks, .. } = &self.lifecycle;
        scheduler.check_with(self.in_flight.front().map_or(&[], |step| &step.plan.batch.copies));
        if !self.has_failed() {
            self.lifecycle.check_transfers();
        }
        delivery
            .digests()
            .into_iter()
            .for_each(|digests| digests.check(|sequence| scheduler.find(sequence).is_some() || masks.has(sequence)));
    }

    /// Publishes the state of the engine to the other threads.
    fn publish(&mut self) -> Stats {
        let stats = self.stats();
        let published = Published { stats, histograms: self.lifecycle.telemetry.histograms };
        *self.shared.published.lock().unwrap_or_else(PoisonError::into_inner) = published;
        self.update_snapshot(&mut self.shared.admission());
        self.lifecycle.delivery.finish_step();
        match self.shared.table.check() {
            Ok(()) => self.publish_events(),
            Err(error) => self.shared.table.close_queues(&error),
        }
        stats
    }

    fn publish_events(&mut self) {
        if let (Some(events), Some(record)) = (&self.shared.events, self.lifecycle.scheduler.cache_record()) {
            events.publish(record);
        }
    }

    fn update_snapshot(&self, snapshot: &mut AdmissionSnapshot) {
        self.lifecycle.scheduler.write_snapshot(&mut snapshot.scheduler);
        (snapshot.step_time, snapshot.step) = (self.device.step_times(), None);
    }

    /// Replaces the contents of a snapshot for the host.
    pub fn write_snapshot(&self, snapshot: &mut EngineSnapshot) {
        let Lifecycle { scheduler, telemetry, live, .. } = &self.lifecycle;
        scheduler.write_map(&mut snapshot.map, |sequence| live.deliverer_of(sequence).map(|sequence| sequence.request));
        (snapshot.time, snapshot.stats) = (self.shared.clock.now(), self.stats());
        snapshot.steps.clear();
        snapshot.steps.extend(telemetry.recent_steps.iter());
    }

    fn report(&mut self, plan: &StepPlan) -> StepReport {
        let Lifecycle { scheduler, telemetry, .. } = &mut self.lifecycle;
        let mut report = StepReport { sequences: plan.sequences.len() as u64, paused: scheduler.paused() as u64, ..StepReport::default() };
        for part in &plan.sequences {
            *if part.decodes() { &mut report.decode_tokens } else { &mut report.prefill_tokens } += part.tokens as u64;
        }
        telemetry.counts.steps += 1;
        telemetry.counts.prompt_tokens += report.prefill_tokens;
        telemetry.counts.blocks_copied += plan.batch.copies.len() as u64;
        report
    }

    fn stats(&self) -> Stats {
        let Lifecycle { scheduler, telemetry, transfers, forks, .. } = &self.lifecycle;
        let (blocks, holders) = (scheduler.blocks(), transfers.exports.holders().count() + forks.pending());
        let slots = (blocks.used_blocks() + scheduler.reserved_blocks()) * blocks.block_size();
        let prefix = scheduler.prefix();
        Stats {
            waiting: scheduler.waiting() as u64,
            running: scheduler.running() as u64,
            paused: scheduler.paused() as u64,
            idle: (scheduler.idle() - holders) as u64,
            blocks_total: blocks.total() as u64,
            blocks_used: blocks.used_blocks() as u64,
            blocks_cached: blocks.cached_blocks() as u64,
            blocks_free: blocks.free_blocks() as u64,
            slot_utilization: if slots == 0 { 1.0 } else { blocks.filled_slots() as f64 / slots as f64 },
            preemptions: scheduler.preemptions(),
            preemptions_swapped: scheduler.preemptions_swapped(),
            swapped: blocks.swapped() as u64,
            swap_blocks_total: blocks.host_total() as u64,
            swap_blocks_used: blocks.host_used() as u64,
            blocks_out_of_window: blocks.dropped_blocks() as u64,
            discard_failures: self.device.executor.discard_failures(),
            blocks_swapped_out: self.device.swaps.blocks_out,
            blocks_swapped_in: self.device.swaps.blocks_in,
            swap_failures: self.device.swaps.failures,
            prefix_queries: prefix.queries,
            prefix_hits: prefix.hits,
            prompt_tokens_cached: telemetry.cached_tokens,
            traces_stopped: telemetry.traces_stopped(),
            journals_stopped: self.source.has_stopped() as u64,
            ..telemetry.counts
        }
    }
}
