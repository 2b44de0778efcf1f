//! Outputs in flat lists and in pages, so that a long queue grows without copies of its outputs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::types::outputs::{Output, OutputContent, OutputView};

/// Number of outputs in a page. The queue of one running request holds one page.
const PAGE: usize = 4;

/// Outputs in the order of their creation. Dropping them returns their pages for reuse.
#[derive(Debug)]
pub struct OutputBatch {
    /// The pages with outputs, of which only the last may have space, and then empty pages.
    pages: VecDeque<Page>,
    /// Number of outputs.
    len: usize,
    content: OutputContent,
    spare: Arc<SparePages>,
}

/// Outputs without their contents. Never grows beyond `PAGE`, its first capacity.
type Page = Vec<OutputHeader>;

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

/// Empty pages that the queues of an engine share. No call blocks, since in a forked child the
/// owner of the lock may not exist.
#[derive(Debug, Default)]
pub struct SparePages {
    pages: Mutex<Vec<Page>>,
    limit: usize,
}

impl SparePages {
    /// Keeps the pages that suit steps of at most `max_seqs` outputs.
    pub fn new(max_seqs: usize) -> SparePages {
        // Each running sequence may have a queue of its own, with one page there and one that the
        // host reads.
        SparePages { pages: Mutex::default(), limit: 2 * max_seqs }
    }

    fn take(&self) -> Result<Page> {
        if let Some(page) = self.pages.try_lock().ok().and_then(|mut pages| pages.pop()) {
            return Ok(page);
        }
        let mut page = Page::new();
        page.try_reserve_exact(PAGE)?;
        Ok(page)
    }

    fn keep(&self, mut page: Page) {
        page.clear();
        if let Ok(mut pages) = self.pages.try_lock()
            && pages.len() < self.limit
            && pages.try_reserve(1).is_ok()
        {
            pages.push(page);
        }
    }
}

impl OutputBatch {
    /// Creates an empty batch.
    pub fn new(spare: Arc<SparePages>) -> OutputBatch {
        OutputBatch { pages: VecDeque::new(), len: 0, content: OutputContent::default(), spare }
    }

    /// Returns the number of outputs.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no outputs.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reserves space for `outputs` outputs, and for the contents of a few.
    pub fn reserve(&mut self, outputs: usize) -> Result<()> {
        self.content.reserve_few()?;
        self.reserve_after(self.len, outputs)
    }

    /// Reserves space for `outputs` outputs behind the first `start` places.
    fn reserve_after(&mut self, start: usize, outputs: usize) -> Result<()> {
        while self.pages.len() * PAGE < start + outputs {
            self.pages.try_reserve(1)?;
            self.pages.push_back(self.spare.take()?);
        }
        Ok(())
    }

    /// Appends the output, which keeps the capacity of its lists, and reserves space for `owed`
    /// outputs without contents. If there is no memory, nothing changes.
    pub fn add(&mut self, output: &mut Output, owed: usize) -> Result<()> {
        self.reserve_after(self.len, 1 + owed)?;
        self.content.add(output.view())?;
        self.add_header(output);
        Ok(())
    }

    /// Appends the output without its contents, in reserved space.
    pub fn add_header(&mut self, output: &mut Output) {
        let header = OutputHeader { output: output.take_header(), end: self.end() };
        self.pages[self.len / PAGE].push(header);
        self.len += 1;
    }

    /// Moves all outputs out of the batch, which then uses the lists of `content`, and leaves space
    /// for `places` outputs without contents. If there is no memory, nothing changes.
    pub fn take(&mut self, places: usize, content: OutputContent) -> Result<OutputBatch> {
        let mut taken = OutputBatch::new(self.spare.clone());
        let used = self.len.div_ceil(PAGE);
        taken.pages.try_reserve_exact(used)?;
        self.reserve_after(used * PAGE, places)?;
        taken.pages.extend(self.pages.drain(..used));
        taken.len = std::mem::take(&mut self.len);
        taken.content = std::mem::replace(&mut self.content, content);
        while self.pages.len() > places.div_ceil(PAGE) {
            self.pages.pop_back().into_iter().for_each(|page| self.spare.keep(page));
        }
        self.shrink();
        Ok(taken)
    }

    /// Frees most of the list of pages after a burst, if there is memory for a shorter list.
    fn shrink(&mut self) {
        let mut shorter = VecDeque::new();
        if self.pages.capacity() > 16 * self.pages.len().max(16) && shorter.try_reserve(self.pages.len()).is_ok() {
            shorter.append(&mut self.pages);
            self.pages = shorter;
        }
    }

    /// Takes the lists of the contents, whose outputs are no longer needed.
    pub fn take_content(&mut self) -> OutputContent {
        self.clear();
        std::mem::take(&mut self.content)
    }

    /// Removes all outputs and the space for further ones.
    pub fn clear(&mut self) {
        self.len = 0;
        self.content.clear();
        self.pages.drain(..).for_each(|page| self.spare.keep(page));
    }

    /// Returns each output without its contents, and a view of its contents.
    pub fn iter(&self) -> impl Iterator<Item = (&Output, OutputView<'_>)> {
        let headers = || self.pages.iter().flatten();
        let starts = std::iter::once(ListEnds::default()).chain(headers().map(|head| head.end));
        headers().zip(starts).map(|(head, start)| (&head.output, self.between(start, head.end)))
    }

    /// Moves all outputs out of the batch, as a list, and leaves space for `places` outputs without
    /// contents. If there is no memory, nothing changes.
    pub fn take_outputs(&mut self, places: usize) -> Result<VecDeque<Output>> {
        let mut outputs = VecDeque::new();
        outputs.try_reserve_exact(self.len())?;
        for (_, view) in self.iter() {
            let mut output = Output::default();
            output.set_view(view)?;
            outputs.push_back(output);
        }
        let mut taken = self.take(places, OutputContent::default())?;
        for (output, header) in outputs.iter_mut().zip(taken.pages.iter_mut().flat_map(|page| page.drain(..))) {
            *output = header.output.with_content_from(output);
        }
        self.content = taken.take_content();
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

impl Drop for OutputBatch {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::types::RequestId;
    use crate::types::outputs::Logprobs;

    fn batch() -> OutputBatch {
        OutputBatch::new(Arc::new(SparePages::new(64)))
    }

    fn spare(batch: &OutputBatch) -> usize {
        batch.spare.pages.lock().unwrap().len()
    }

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

    fn add(batch: &mut OutputBatch, outputs: std::ops::Range<u32>) {
        outputs.for_each(|i| batch.add(&mut output(i), 0).unwrap());
    }

    #[test]
    fn an_output_batch_returns_the_added_outputs() {
        let mut batch = batch();
        for count in [0, 1, 8, 9, 20] {
            add(&mut batch, 0..count);
            assert_eq!(batch.len(), count as usize);
            assert!(batch.iter().zip(0..count).all(|((header, view), i)| header.request.get() == i as u64 && view.text == output(i).text));
            assert_eq!(batch.iter().count(), count as usize);
            assert_eq!(batch.take_outputs(0).unwrap(), (0..count).map(output).collect::<Vec<_>>());
            assert!(batch.is_empty());
        }
    }

    #[test]
    fn pages_and_lists_are_reused_after_the_reader_has_dropped_them() {
        let (mut batch, mut content) = (batch(), OutputContent::default());
        let mut addresses = Vec::new();
        for _ in 0..4 {
            add(&mut batch, 5..6);
            let mut taken = batch.take(1, content).unwrap();
            addresses.push((taken.pages[0].as_ptr(), taken.content.text.as_ptr()));
            content = taken.take_content();
        }
        assert_eq!((addresses[0], addresses[1]), (addresses[2], addresses[3]), "two batches alternate");
        assert_eq!((batch.pages.len(), spare(&batch)), (1, 1));
    }

    #[test]
    fn an_output_keeps_the_capacity_of_its_lists() {
        let mut kept = output(5);
        batch().add(&mut kept, 0).unwrap();
        assert!(kept.tokens.capacity() >= 5 && kept.sequence_state.is_empty());
    }

    #[test]
    fn owed_outputs_have_space_whatever_is_added_and_taken() {
        let mut batch = batch();
        let space = |batch: &OutputBatch| batch.pages.iter().map(|page| page.capacity() - page.len()).sum::<usize>();
        for owed in [0, 1, 7, 8, 9, 30, 2] {
            batch.reserve(owed).unwrap();
            assert!(space(&batch) >= owed);
            (0..5).for_each(|i| batch.add(&mut output(i), owed).unwrap());
            assert!(space(&batch) >= owed);
            assert_eq!(batch.take(owed, OutputContent::default()).unwrap().len(), 5);
            assert_eq!(batch.pages.len(), owed.div_ceil(PAGE), "no page more than that");
        }
    }

    #[test]
    fn an_idle_batch_holds_no_page_and_few_spare_pages_are_kept() {
        let mut batch = batch();
        (0..5000).for_each(|_| batch.add(&mut Output::default(), 0).unwrap());
        let taken = batch.take(0, OutputContent::default()).unwrap();
        assert_eq!((batch.pages.len(), taken.len()), (0, 5000));
        assert!(batch.pages.capacity() < 64, "{}", batch.pages.capacity());
        drop(taken);
        assert_eq!(spare(&batch), batch.spare.limit);
    }
}
