//! The seam between deciding what to compute and computing it.

use crate::backend::{Backend, BatchSize, InputLimits};
use crate::batch::draws::{DrawLimits, Drawn, Draws};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::Result;
use crate::kv::BlockId;
use crate::model::{Decoder, KvCache};
use crate::sched::StepPlan;

/// Computes plans. The engine's runner has a model; a test's runner may dictate the logits.
pub trait Runner: Send {
    /// Starts a step.
    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket>;
    /// Finishes it: `[sampled parts, vocab]` logits.
    fn wait(&mut self, ticket: Ticket) -> Result<&[f32]>;

    /// How many tokens of a step it can draw by itself. None: whoever reads the logits chooses.
    fn draw_limits(&self) -> Option<DrawLimits> {
        None
    }

    /// Whether it may begin with the step that a plan of so many rows foresees before it is asked for it.
    fn works_ahead(&self, _rows: usize) -> bool {
        false
    }

    /// Whether it has begun with what the last plan foresaw.
    fn is_ahead(&self) -> bool {
        false
    }

    /// That will not come.
    fn forget_foreseen(&mut self) {}

    /// As `wait`, with a token drawn from each row that `draws` names. What these rows then hold is nobody's business.
    fn wait_and_draw(&mut self, ticket: Ticket, _draws: &Draws) -> Result<Computed<'_>> {
        Ok(Computed { logits: self.wait(ticket)?, drawn: &[] })
    }

    /// Whether no step can be computed any more, whoever is in it.
    fn is_lost(&self) -> bool {
        false
    }

    /// Copies blocks to the host tier. After an error nothing is known of any of them there.
    fn swap_out(&mut self, _moves: &[BlockMove]) -> Result<()> {
        Ok(())
    }

    /// Copies blocks back.
    fn swap_in(&mut self, _moves: &[BlockMove]) -> Result<()> {
        Ok(())
    }

    /// Appends the K and V of a sequence's blocks, as they are stored, to `out`. A runner without any has nothing to say.
    fn read_blocks(&self, _blocks: &[BlockId], _tail: Tail, _out: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    /// Takes them back.
    fn write_blocks(&mut self, _blocks: &[BlockId], _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Makes the moves, which read no block that they write, and gives back the memory of all blocks from `blocks` on.
    fn shrink(&mut self, _moves: &[BlockCopy], _blocks: usize) -> Result<()> {
        Ok(())
    }

    /// How often the memory of blocks was not taken back: they are gone all the same, and the process is no smaller.
    fn discard_failures(&self) -> u64 {
        0
    }

    /// How K and V are stored: blocks that one runner reads are right in another that says the same.
    fn layout(&self) -> String {
        String::new()
    }
}

/// What came of a step.
pub struct Computed<'a> {
    pub logits: &'a [f32], // [rows of logits, vocab], of which those that were drawn from hold anything
    pub drawn: &'a [Drawn],
}

/// A step that was started and not yet finished.
#[must_use]
#[derive(Debug)]
pub struct Ticket {
    /// Rows of logits to come.
    pub logits: usize,
}

pub struct ModelRunner<B: Backend> {
    decoder: Decoder<B>,
    kv: KvCache<B>,
    discard_failures: u64,
}

impl<B: Backend> ModelRunner<B> {
    pub fn new(decoder: Decoder<B>, kv: KvCache<B>) -> ModelRunner<B> {
        ModelRunner { decoder, kv, discard_failures: 0 }
    }

    pub fn backend(&self) -> &B {
        self.decoder.backend()
    }

    /// Makes room for the largest batch, and computes these: then steps take nothing more of a device's memory. K and V become anything.
    pub fn rehearse(&mut self, limits: &InputLimits, batches: &[Batch]) -> Result<()> {
        self.decoder.reserve_inputs(limits)?;
        for batch in batches.iter().filter(|batch| batch.rows() > 0) {
            self.decoder.forward(batch, &mut self.kv)?;
            // The most that any step has, whatever this one computed: what they are read into must be there, too.
            self.decoder.logits(limits.most.logits)?;
        }
        Ok(())
    }

    /// Has the device keep its decode steps; `batch` is one of them, of one row.
    pub fn keep_steps(&mut self, most: &BatchSize, batch: &Batch) -> Result<()> {
        self.decoder.keep_steps(most, batch, &mut self.kv)
    }

    /// The same with a block that goes to the host tier and comes back.
    pub fn rehearse_swap(&mut self) -> Result<()> {
        let there_and_back = [BlockMove { device: 0, host: 0 }];
        self.swap_out(&there_and_back)?;
        self.swap_in(&there_and_back)
    }
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket> {
        self.decoder.forward(&plan.batch, &mut self.kv)?;
        Ok(Ticket { logits: plan.batch.logit_rows.len() })
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&[f32]> {
        self.decoder.logits(ticket.logits)
    }

    fn draw_limits(&self) -> Option<DrawLimits> {
        self.decoder.draw_limits()
    }

    fn wait_and_draw(&mut self, ticket: Ticket, draws: &Draws) -> Result<Computed<'_>> {
        let (logits, drawn) = self.decoder.logits_and_draws(ticket.logits, draws)?;
        Ok(Computed { logits, drawn })
    }

    fn works_ahead(&self, rows: usize) -> bool {
        self.decoder.backend().works_ahead(rows)
    }

    fn is_ahead(&self) -> bool {
        self.decoder.backend().is_ahead()
    }

    fn forget_foreseen(&mut self) {
        self.decoder.backend().forget_foreseen();
    }

    fn is_lost(&self) -> bool {
        self.decoder.backend().is_lost()
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.kv.swap_out(self.decoder.backend(), moves)
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        self.kv.swap_in(self.decoder.backend(), moves)
    }

    fn read_blocks(&self, blocks: &[BlockId], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        self.kv.read(self.decoder.backend(), blocks, tail, out)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) -> Result<()> {
        self.forget_foreseen();
        self.kv.write(self.decoder.backend(), blocks, bytes)
    }

    fn shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        self.forget_foreseen();
        self.kv.copy(self.decoder.backend(), moves);
        // Nothing is read, but what has gone wrong is told.
        self.decoder.logits(0)?;
        // What was moved is where it belongs: there is no way back, and no need of one.
        self.discard_failures += self.kv.discard(self.decoder.backend(), blocks).is_err() as u64;
        Ok(())
    }

    fn discard_failures(&self) -> u64 {
        self.discard_failures
    }

    fn layout(&self) -> String {
        self.kv.layout(self.decoder.backend())
    }
}
