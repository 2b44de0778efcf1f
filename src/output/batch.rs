//! Outputs in flat lists. When the lists have grown, a further output needs no allocation.

use std::collections::VecDeque;

use crate::error::{Result, try_grow};
use crate::types::outputs::{Output, OutputContent, OutputView};

/// Outputs in the order of their creation.
#[derive(Debug, Default)]
pub struct OutputBatch {
    headers: Vec<OutputHeader>,
    content: OutputContent,
}

/// An output without its contents. The contents are in the lists of the batch, between the end of
/// the previous output and `end`.
#[derive(Debug)]
struct OutputHeader {
    output: Output,
    end: ListEnds,
}

/// The end of an output in each list.
#[derive(Debug, Clone, Copy, Default)]
struct ListEnds {
    tokens: usize,
    logprobs: usize,
    top: usize,
    prompt_logprobs: usize,
    prompt_top: usize,
    text: usize,
}

impl OutputBatch {
    /// Returns the number of outputs.
    pub fn len(&self) -> usize {
        self.headers.len()
    }

    /// Returns whether there are no outputs.
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Removes all outputs and keeps the memory.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.content.clear();
    }

    /// Reserves space for `outputs` outputs with one token and its text.
    pub fn reserve(&mut self, outputs: usize) -> Result<()> {
        const TEXT: usize = 16;
        self.headers.try_reserve(outputs)?;
        self.content.tokens.try_reserve(outputs)?;
        self.content.logprobs.tokens.try_reserve(outputs)?;
        Ok(self.content.text.try_reserve(outputs * TEXT)?)
    }

    /// Reserves space for `outputs` outputs without contents.
    pub fn reserve_heads(&mut self, outputs: usize) -> Result<()> {
        try_grow(&mut self.headers, outputs)
    }

    /// Returns whether the capacity is many times larger than the current and the pending outputs
    /// require.
    pub fn is_oversized(&self, owed: usize) -> bool {
        const USUAL: usize = 64;
        self.headers.capacity() > 16 * self.len().max(owed).max(USUAL)
    }

    /// Appends the output, which keeps the capacity of its lists, and reserves space for `owed`
    /// outputs without contents. If there is no memory, nothing changes.
    pub fn add(&mut self, output: &mut Output, owed: usize) -> Result<()> {
        self.reserve_heads(1 + owed)?;
        self.content.add(output.view())?;
        self.headers.push(OutputHeader { output: output.take_header(), end: self.end() });
        Ok(())
    }

    /// Appends the output without its contents, in reserved space.
    pub fn add_header(&mut self, output: &mut Output) {
        self.headers.push(OutputHeader { output: output.take_header(), end: self.end() });
    }

    /// Returns each output without its contents, and a view of its contents.
    pub fn iter(&self) -> impl Iterator<Item = (&Output, OutputView<'_>)> {
        let starts = std::iter::once(ListEnds::default()).chain(self.headers.iter().map(|head| head.end));
        self.headers.iter().zip(starts).map(|(head, start)| (&head.output, self.between(start, head.end)))
    }

    /// Moves all outputs out of the batch. If there is no memory, nothing changes.
    pub fn take_outputs(&mut self) -> Result<VecDeque<Output>> {
        let mut outputs = VecDeque::new();
        outputs.try_reserve_exact(self.len())?;
        for (_, view) in self.iter() {
            let mut output = Output::default();
            output.set_view(view)?;
            outputs.push_back(output);
        }
        for (output, head) in outputs.iter_mut().zip(&mut self.headers) {
            *output = std::mem::take(&mut head.output).with_content_from(output);
        }
        self.clear();
        Ok(outputs)
    }

    fn end(&self) -> ListEnds {
        let OutputContent { tokens, logprobs, prompt_logprobs, text } = &self.content;
        ListEnds {
            tokens: tokens.len(),
            logprobs: logprobs.tokens.len(),
            top: logprobs.top.len(),
            prompt_logprobs: prompt_logprobs.tokens.len(),
            prompt_top: prompt_logprobs.top.len(),
            text: text.len(),
        }
    }

    fn between(&self, start: ListEnds, end: ListEnds) -> OutputView<'_> {
        let OutputContent { tokens, logprobs, prompt_logprobs, text } = &self.content;
        OutputView {
            tokens: &tokens[start.tokens..end.tokens],
            logprobs: &logprobs.tokens[start.logprobs..end.logprobs],
            top: &logprobs.top[start.top..end.top],
            prompt_logprobs: &prompt_logprobs.tokens[start.prompt_logprobs..end.prompt_logprobs],
            prompt_top: &prompt_logprobs.top[start.prompt_top..end.prompt_top],
            text: &text[start.text..end.text],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::types::RequestId;
    use crate::types::outputs::Logprobs;

    fn output(i: u32) -> Output {
        let logprobs = |count| Logprobs { tokens: vec![i as f32; count], top: vec![(i, -1.0); 2 * count] };
        Output {
            request: RequestId::from_raw(i as u64),
            tokens: vec![i; i as usize],
            logprobs: logprobs(i as usize % 3),
            prompt_logprobs: logprobs(i as usize % 2),
            text: "é".repeat(i as usize),
            error: (i == 2).then(|| Error::invalid("why")),
            sequence_state: vec![i as u8; (i == 3) as usize],
            ..Output::default()
        }
    }

    #[test]
    fn an_output_batch_returns_the_added_outputs() {
        let mut batch = OutputBatch::default();
        for _ in 0..2 {
            (0..6).for_each(|i| batch.add(&mut output(i), 0).unwrap());
            assert!(batch.iter().zip(0..6).all(|((header, view), i)| header.request.get() == i && view.text == output(i as u32).text));
            assert_eq!(batch.take_outputs().unwrap(), (0..6).map(output).collect::<Vec<_>>());
            assert!(batch.is_empty());
        }
    }

    #[test]
    fn a_cleared_output_batch_reuses_its_memory() {
        let mut batch = OutputBatch::default();
        (0..6).for_each(|i| batch.add(&mut output(i), 0).unwrap());
        let addresses = |batch: &OutputBatch| (batch.headers.as_ptr(), batch.content.tokens.as_ptr(), batch.content.text.as_ptr());
        let before = addresses(&batch);
        batch.clear();
        let mut reused = output(5);
        batch.add(&mut reused, 0).unwrap();
        assert_eq!(addresses(&batch), before);
        assert!(reused.tokens.capacity() >= 5 && reused.sequence_state.is_empty());
    }
}
