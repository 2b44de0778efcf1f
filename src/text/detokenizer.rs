//! Tokens to text as they come, a window of tokens at a time.

use super::Text;
use crate::error::{Result, try_refill};

/// Three bytes may wait for the last one of their character. A byte-level decoder shows them as one
/// U+FFFD, a byte-fallback decoder as up to three: so many are held back, never more.
const MAX_HELD: usize = 3;

/// The tokens that are kept as context where the window has to be cut. A decoder that starts within
/// a character is back in step three bytes later, and the character that is held back starts at most
/// three before the end; three more tokens may be given up to find a beginning (see `aligned`).
const CONTEXT: usize = 10;

/// The window is cut when it has more tokens, which takes a run of tokens without text or of bytes
/// that are no UTF-8: it bounds the work per token. Otherwise the window has about two tokens.
const MAX_WINDOW: usize = 32;

/// One sequence's incremental detokenizer: plain data, which a fork copies by value.
///
/// What it emits in all is what `decode` says of the whole sequence, after what `decode` says of the
/// prompt. Text that has been emitted can't be taken back, so there are exceptions, all of them about
/// bytes that are no UTF-8, and none for byte-level decoders unless the prompt ends within a character:
///
/// - `decode` writes U+FFFD for every byte of a byte-fallback run with a single error in it. Here, the
///   characters that were complete before the error stay; and characters after it are whole again
///   where the run is longer than the window (32 tokens) or began in the prompt, beyond the context.
///   U+FFFD itself, spelled in such bytes, counts as an error.
/// - A character that begins in the prompt and ends in the first tokens is emitted whole.
/// - A sentencepiece decoder takes the first space of a text away: where the prompt's last ten tokens
///   are all special and skipped, it takes that of the first token too, as if the prompt were empty.
#[derive(Clone, Default, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// Context, then the tokens whose text is not emitted yet, or not all of it.
    window: Vec<u32>,
    /// How many tokens of the window are context.
    context: usize,
    /// The window's text as far as it is emitted: the window's text begins with it.
    shown: String,
    /// The window is a prompt whose text is not in `shown` yet.
    primed: bool,
}

impl Detokenizer {
    /// An empty sequence. With `skip_special`, special tokens have no text.
    pub fn new(skip_special: bool) -> Self {
        Detokenizer { skip_special, ..Detokenizer::default() }
    }

    /// Room for all that the window can hold.
    pub fn reserve(&mut self) -> Result<()> {
        Ok(self.window.try_reserve((MAX_WINDOW + 1).saturating_sub(self.window.len()))?)
    }

    /// Becomes the same as `other`, in the room that there is.
    pub fn copy(&mut self, other: &Detokenizer) -> Result<()> {
        (self.skip_special, self.context, self.primed) = (other.skip_special, other.context, other.primed);
        try_refill(&mut self.window, &other.window)?;
        self.shown.clear();
        say(&other.shown, &mut self.shown)
    }

    /// Returns whether the text omits special tokens.
    pub fn skips_special(&self) -> bool {
        self.skip_special
    }

    /// Starts anew after `prompt`, of which the last few tokens are kept: they tell, for example,
    /// whether the space in front of the first generated token is shown. Tokens that the vocabulary
    /// does not have are ignored.
    pub fn prime(&mut self, prompt: &[u32]) {
        self.window.clear();
        self.window.extend_from_slice(&prompt[prompt.len().saturating_sub(CONTEXT)..]);
        self.shown.clear();
        self.context = self.window.len();
        self.primed = true;
    }

    /// Appends to `out` the text that `token` completes: always valid UTF-8, never half a character
    /// (it is held back until it is complete). A token that the tokenizer does not know, such as a padded row of the
    /// model, has none. After an error nothing has changed.
    pub fn push(&mut self, text: &Text, token: u32, out: &mut String) -> Result<()> {
        if !text.tokenizer.shows(token, self.skip_special) {
            return Ok(());
        }
        self.settle_prompt(text)?;
        self.window.push(token);
        self.advance(text, out).inspect_err(|_| {
            self.window.pop();
        })
    }

    /// Appends what is still held back when the sequence ends: incomplete bytes become U+FFFD. If the
    /// sequence continues, `push` continues from here.
    pub fn finish(&mut self, text: &Text, out: &mut String) -> Result<()> {
        self.settle_prompt(text)?;
        let full = self.decode(text, &self.window)?;
        match self.seam(&full) {
            Some(seam) => say(&full[seam..], out)?,
            None => say(&self.decode(text, &self.window[self.unshown()..])?, out)?,
        }
        self.context = self.window.len();
        self.shown = full;
        Ok(())
    }

    /// Emits what the window's newest token completes.
    fn advance(&mut self, text: &Text, out: &mut String) -> Result<()> {
        let full = self.decode(text, &self.window)?;
        let Some(seam) = self.seam(&full) else { return self.restart(text, &full, out) };
        self.emit(text, full, seam, out)
    }

    /// Emits `full`, the window's text, from `seam` on, save the bytes that may still be completed.
    fn emit(&mut self, text: &Text, mut full: String, seam: usize, out: &mut String) -> Result<()> {
        let complete = self.complete_len(&full).max(seam);
        let all = complete == full.len();
        out.try_reserve(full.len() - seam)?;
        if all && complete > seam {
            // The tokens that did it are enough of a context for those that follow.
            let shown = self.decode(text, &self.window[self.context..])?;
            self.window.drain(..self.context);
            out.push_str(&full[seam..]);
            self.shown = shown;
        } else if self.window.len() > MAX_WINDOW {
            return self.cut(text, &full, seam, out);
        } else {
            out.push_str(&full[seam..complete]);
            full.truncate(complete);
            self.shown = full;
        }
        if all {
            self.context = self.window.len();
        }
        Ok(())
    }

    /// Where in `full`, the window's text, what is not emitted yet begins; nothing if `full` does not
    /// begin with what is emitted.
    fn seam(&self, full: &str) -> Option<usize> {
        if full.starts_with(&self.shown) {
            return Some(self.shown.len());
        }
        // A prompt, or a sequence that had ended, stopped within a character: now it is complete.
        let stem = self.shown.trim_end_matches('\u{FFFD}');
        (!full.ends_with('\u{FFFD}') && full.starts_with(stem)).then_some(stem.len())
    }

    /// Bytes have turned a character that is already emitted into errors. It may come back when they
    /// make a character themselves; otherwise it stays, and they are decoded by themselves.
    fn restart(&mut self, text: &Text, full: &str, out: &mut String) -> Result<()> {
        let fresh = self.unshown();
        let may_complete = full.ends_with('\u{FFFD}') && self.window.len() - fresh <= MAX_HELD;
        if self.context > 0 && may_complete {
            return Ok(());
        }
        let alone = self.decode(text, &self.window[fresh..])?;
        out.try_reserve(alone.len())?;
        self.window.drain(..fresh);
        self.context = 0;
        self.shown.clear();
        self.emit(text, alone, 0, out)
    }

    /// Where in the window the tokens begin that are not shown: with the newest, if all took part.
    fn unshown(&self) -> usize {
        if self.context > 0 { self.context } else { self.window.len().saturating_sub(1) }
    }

    /// Forgets the window's older tokens, and emits what can't be completed any more.
    fn cut(&mut self, text: &Text, full: &str, seam: usize, out: &mut String) -> Result<()> {
        let complete = self.complete_len(full).max(seam);
        let start = self.window.len() - CONTEXT;
        let (skipped, mut shown) = self.aligned(text, &self.window[start..])?;
        match shown.strip_suffix(&full[complete..]).map(str::len) {
            Some(len) => {
                shown.truncate(len);
                out.push_str(&full[seam..complete]);
            }
            // Without the older tokens the bytes that are held back make sense, but too late.
            None => out.push_str(&full[seam..]),
        }
        self.window.drain(..start + skipped);
        self.context = self.window.len() - MAX_HELD;
        self.shown = shown;
        Ok(())
    }

    /// How many of the first tokens to leave out so that the text does not begin within a character,
    /// and the text of the others.
    fn aligned(&self, text: &Text, tokens: &[u32]) -> Result<(usize, String)> {
        let whole = self.decode(text, tokens)?;
        if whole.starts_with('\u{FFFD}') {
            for skipped in 1..tokens.len().min(MAX_HELD + 1) {
                let rest = self.decode(text, &tokens[skipped..])?;
                if !rest.starts_with('\u{FFFD}') {
                    return Ok((skipped, rest));
                }
            }
        }
        Ok((0, whole))
    }

    /// Decodes the prompt's last tokens, once: `prime` had no text side to do it.
    fn settle_prompt(&mut self, text: &Text) -> Result<()> {
        if !self.primed {
            return Ok(());
        }
        let known = |token: &u32| matches!(text.tokenizer.piece(*token, self.skip_special), Ok(Some(_)));
        self.window.retain(known);
        let (skipped, shown) = self.aligned(text, &self.window)?;
        self.window.drain(..skipped);
        self.context = self.window.len();
        self.shown = shown;
        self.primed = false;
        Ok(())
    }

    /// The length of the text without the U+FFFD at its end that may still become characters. A run of
    /// fallback bytes shows one for each of its bytes until its last character is complete, so the first
    /// few new tokens may turn even those of the context back.
    fn complete_len(&self, full: &str) -> usize {
        let fresh = self.window.len() - self.context;
        let max_chars = if fresh <= MAX_HELD { usize::MAX } else { MAX_HELD };
        let errors = full.chars().rev().take(max_chars).take_while(|&c| c == '\u{FFFD}').count();
        full.len() - errors * '\u{FFFD}'.len_utf8()
    }

    fn decode(&self, text: &Text, tokens: &[u32]) -> Result<String> {
        text.tokenizer.decode(tokens, self.skip_special)
    }
}

/// The text of a whole sequence may come out here.
fn say(text: &str, out: &mut String) -> Result<()> {
    out.try_reserve(text.len())?;
    out.push_str(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::tests::golden_dir;
    use super::*;

    fn text(name: &str) -> Text {
        Text::load(&golden_dir().join(name)).unwrap()
    }

    /// The text that a sequence emits. The caller checks the part of `finish`.
    fn stream(text: &Text, skip_special: bool, prompt: &[u32], tokens: &[u32]) -> String {
        let mut detokenizer = Detokenizer::new(skip_special);
        detokenizer.prime(prompt);
        let mut out = String::new();
        for &token in tokens {
            detokenizer.push(text, token, &mut out).unwrap();
            assert!(detokenizer.window.len() <= MAX_WINDOW + 1, "{tokens:?}");
        }
        detokenizer.finish(text, &mut out).unwrap();
        out
    }

    #[track_caller]
    fn assert_streams_as_decoded(text: &Text, skip_special: bool, prompt: &[u32], tokens: &[u32]) {
        let before = text.decode(prompt, skip_special).unwrap();
        let whole = text.decode(&[prompt, tokens].concat(), skip_special).unwrap();
        let expected = whole.strip_prefix(&before).expect("a prompt of whole characters");
        assert_eq!(stream(text, skip_special, prompt, tokens), expected, "{prompt:?} then {tokens:?}");
    }

    /// The tokens of the bytes of a sentencepiece vocabulary.
    fn bytes(text: &Text, bytes: &[u8]) -> Vec<u32> {
        bytes.iter().map(|byte| text.tokenizer.token_id(&format!("<0x{byte:02X}>")).unwrap()).collect()
    }

    const PROMPTS: [&str; 5] = ["", "Hello", "Hello, wörld 😀", "  two spaces  ", "a\n"];
    const CHARS: [char; 8] = ['a', ' ', 'é', '今', '😀', '\n', '\u{7FF}', '\u{10FFFF}'];

    #[test]
    fn byte_level_stream_equals_decode_for_any_tokens() {
        let text = text("byte_level");
        let mut random = Random(1);
        let singles: Vec<u32> = (0..text.vocab_size() as u32).filter(|&t| text.decode(&[t], false).unwrap() == "\u{FFFD}").collect();
        for round in 0..4000 {
            let prompt = text.encode(PROMPTS[round % PROMPTS.len()], round % 2 == 0).unwrap();
            let any = (0..random.below(60)).map(|_| match random.below(3) {
                0 => random.below(text.vocab_size()) as u32,
                _ => *random.pick(&singles),
            });
            let tokens: Vec<u32> = any.collect();
            assert_streams_as_decoded(&text, round % 3 == 0, &prompt, &tokens);
        }
    }

    /// Byte runs of whole characters, and runs that begin with an error and fit the window.
    fn byte_fallback_tokens(text: &Text, random: &mut Random) -> Vec<u32> {
        let mut tokens = Vec::new();
        for _ in 0..random.below(12) {
            let mut run = Vec::new();
            if random.below(3) == 0 {
                run.push(*random.pick(&[0x80, 0xC0, 0xFF]));
                run.extend((0..random.below(12)).map(|_| random.below(256) as u8));
            } else {
                let string: String = (0..random.below(6)).map(|_| *random.pick(&CHARS)).collect();
                run.extend(string.as_bytes());
            }
            tokens.extend(bytes(text, &run));
            tokens.push(*random.pick(&[0, 1, 2, 300, 310, 320]));
            tokens.push(259 + random.below(text.vocab_size() - 259) as u32);
        }
        tokens
    }

    #[test]
    fn byte_fallback_stream_equals_decode_for_whole_characters_and_for_short_errors() {
        for name in ["llama2", "metaspace"] {
            let text = text(name);
            let mut random = Random(2);
            for round in 0..2000 {
                let prompt = text.encode(PROMPTS[round % PROMPTS.len()], round % 2 == 0).unwrap();
                let tokens = byte_fallback_tokens(&text, &mut random);
                assert_streams_as_decoded(&text, false, &prompt, &tokens);
            }
        }
    }

    #[test]
    fn byte_fallback_stream_contains_all_text_of_decode_for_any_tokens() {
        for name in ["llama2", "metaspace"] {
            let text = text(name);
            let mut random = Random(3);
            for _ in 0..2000 {
                let limit = *random.pick(&[259, text.vocab_size()]);
                let tokens: Vec<u32> = (0..random.below(90)).map(|_| random.below(limit) as u32).collect();
                let streamed = stream(&text, true, &[], &tokens);
                let mut rest = streamed.chars();
                for c in text.decode(&tokens, true).unwrap().chars().filter(|&c| c != '\u{FFFD}') {
                    assert!(rest.any(|r| r == c), "{c:?} is not in {streamed:?} of {tokens:?}");
                }
            }
        }
    }

    #[test]
    fn character_is_held_back_until_its_last_byte() {
        let text = text("llama2");
        let mut detokenizer = Detokenizer::new(true);
        let mut seen = Vec::new();
        for token in bytes(&text, "é😀".as_bytes()) {
            let mut out = String::new();
            detokenizer.push(&text, token, &mut out).unwrap();
            seen.push(out);
        }
        assert_eq!(seen, ["", "é", "", "", "", "😀"]);
    }

    #[test]
    fn text_before_half_a_character_is_not_held_back() {
        let text = text("byte_level");
        let mut detokenizer = Detokenizer::new(true);
        let mut out = String::new();
        for token in text.encode("ab", false).unwrap() {
            detokenizer.push(&text, token, &mut out).unwrap();
        }
        detokenizer.push(&text, text.tokenizer.token_id("ð").unwrap(), &mut out).unwrap();
        assert_eq!(out, "ab");
        detokenizer.finish(&text, &mut out).unwrap();
        assert_eq!(out, "ab\u{FFFD}");
    }

    #[test]
    fn character_emitted_before_an_error_in_its_run_of_bytes_stays() {
        let text = text("llama2");
        let tokens = bytes(&text, b"\xC3\xA9\xFFa");
        assert_eq!(text.decode(&tokens, true).unwrap(), "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}");
        assert_eq!(stream(&text, true, &[], &tokens), "é\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn character_that_begins_in_the_prompt_is_emitted_whole() {
        for name in ["llama2", "metaspace"] {
            let text = text(name);
            let tokens = bytes(&text, "今".as_bytes());
            assert_eq!(stream(&text, true, &tokens[..2], &tokens[2..]), "今");
            assert_eq!(stream(&text, true, &tokens[..1], &tokens[1..]), "今");
        }
    }

    #[test]
    fn error_at_the_end_of_the_prompt_is_not_emitted_again() {
        let text = text("llama2");
        let a = text.tokenizer.token_id("a").unwrap();
        assert_eq!(stream(&text, true, &bytes(&text, b"\xFF"), &[a]), "a");
    }

    #[test]
    fn first_space_is_kept_after_a_prompt_and_stripped_without_one() {
        let text = text("llama2");
        let word = text.encode("a", false).unwrap();
        let prompt = text.encode("a", true).unwrap();
        assert_eq!(stream(&text, true, &prompt, &word), " a");
        assert_eq!(stream(&text, true, &[], &word), "a");
        assert_eq!(stream(&text, true, &[1], &word), "a");
    }

    #[test]
    fn endless_run_of_errors_keeps_the_window_small_and_is_emitted_continuously() {
        for name in ["byte_level", "llama2"] {
            let text = text(name);
            let token = text.tokenizer.token_id("<0xFF>").or_else(|| text.tokenizer.token_id("ÿ")).unwrap();
            let mut detokenizer = Detokenizer::new(false);
            let mut out = String::new();
            for _ in 0..10_000 {
                detokenizer.push(&text, token, &mut out).unwrap();
            }
            assert!(detokenizer.window.len() <= MAX_WINDOW);
            assert_eq!(out.chars().count(), 10_000 - MAX_HELD);
            detokenizer.finish(&text, &mut out).unwrap();
            assert_eq!(out.chars().count(), 10_000);
        }
    }

    #[test]
    fn skipped_special_tokens_do_not_change_the_text() {
        let text = text("llama2");
        let word = text.encode("a", false).unwrap();
        let tokens = [&word[..], &[1; 100], &word[..], &[2]].concat();
        assert_eq!(stream(&text, true, &[], &tokens), "a a");
    }

    #[test]
    fn clone_is_independent() {
        let text = text("llama2");
        let smile = bytes(&text, "😀".as_bytes());
        let (mut one, mut out) = (Detokenizer::new(true), String::new());
        for &token in &smile[..2] {
            one.push(&text, token, &mut out).unwrap();
        }
        let mut two = one.clone();
        for &token in &smile[2..] {
            one.push(&text, token, &mut out).unwrap();
        }
        assert_eq!(out, "😀");
        two.finish(&text, &mut out).unwrap();
        assert_eq!(out, "😀\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn unknown_token_has_no_text_and_changes_nothing() {
        let text = text("llama2");
        let mut detokenizer = Detokenizer::new(true);
        let mut out = String::new();
        let smile = bytes(&text, "😀".as_bytes());
        for &token in &smile {
            detokenizer.push(&text, 1_000_000, &mut out).unwrap();
            detokenizer.push(&text, token, &mut out).unwrap();
        }
        assert_eq!(out, "😀");
    }

    #[test]
    fn prompt_of_unknown_tokens_equals_no_prompt() {
        let text = text("llama2");
        let word = text.encode("a", false).unwrap();
        assert_eq!(stream(&text, true, &[u32::MAX; 20], &word), "a");
    }

    #[test]
    fn ended_sequence_can_continue() {
        let text = text("llama2");
        let word = text.encode("a", false).unwrap();
        let mut detokenizer = Detokenizer::new(true);
        let mut out = String::new();
        for _ in 0..3 {
            for &token in &word {
                detokenizer.push(&text, token, &mut out).unwrap();
            }
            detokenizer.finish(&text, &mut out).unwrap();
        }
        assert_eq!(out, "a a a");
    }
}
