//! Converts tokens to text one at a time, within a window of recent tokens.

use super::Text;
use crate::error::{Result, try_refill};

/// Number of U+FFFD at the end of a text that may still become a character. Up to three bytes of an
/// incomplete character are decoded to one U+FFFD by byte-level decoders and to up to three by
/// byte-fallback decoders.
const MAX_HELD: usize = 3;

/// Number of tokens that stay as context if the window is cut. A decoder that starts within a
/// character is synchronized after three bytes. The incomplete character begins at most three bytes
/// before the end. `aligned` may drop three more tokens.
const CONTEXT: usize = 10;

/// Maximum length of the window, which bounds the work per token. Only a run of tokens without
/// text, or of bytes that are not UTF-8, exceeds it. Otherwise the window has about two tokens.
const MAX_WINDOW: usize = 32;

/// The incremental detokenizer of one sequence: plain data that a fork copies.
///
/// The emitted text equals the decoded whole sequence without the decoded prompt. Emitted text
/// cannot be changed later. There are therefore exceptions, which concern bytes that are not UTF-8.
/// Byte-level decoders have them only if the prompt ends within a character:
///
/// - `decode` writes U+FFFD for every byte of a byte-fallback run with an error. Here, characters
///   that were complete before the error stay. Characters after the error are decoded if the run is
///   longer than the window, or began in the prompt before the context. An encoded U+FFFD counts as
///   an error.
/// - A character that begins in the prompt and ends in the first tokens is emitted as a whole.
/// - A sentencepiece decoder removes the first space of a text. If the last ten tokens of the
///   prompt are special tokens that are skipped, the first space of the output is removed, as if
///   the prompt were empty.
#[derive(Clone, Default, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// The context, followed by the tokens whose text is not fully emitted.
    window: Vec<u32>,
    /// Number of tokens of the context.
    context: usize,
    /// The emitted part of the window's text, which begins with it.
    shown: String,
    /// If true, the window is a prompt whose text is not in `shown` yet.
    primed: bool,
}

impl Detokenizer {
    /// Creates the detokenizer of an empty sequence. With `skip_special`, special tokens have no
    /// text.
    pub fn new(skip_special: bool) -> Self {
        Detokenizer { skip_special, ..Detokenizer::default() }
    }

    /// Reserves memory for the longest window.
    pub fn reserve(&mut self) -> Result<()> {
        Ok(self.window.try_reserve((MAX_WINDOW + 1).saturating_sub(self.window.len()))?)
    }

    /// Copies `other` without an allocation, if the reserved memory suffices.
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

    /// Restarts after `prompt` and keeps its last tokens as context. They decide, for example, if
    /// the first generated token begins with a space. Unknown tokens are ignored.
    pub fn prime(&mut self, prompt: &[u32]) {
        self.window.clear();
        self.window.extend_from_slice(&prompt[prompt.len().saturating_sub(CONTEXT)..]);
        self.shown.clear();
        self.context = self.window.len();
        self.primed = true;
    }

    /// Appends to `out` the text that `token` completes. The text is valid UTF-8: the bytes of an
    /// incomplete character are held back. Unknown tokens, such as padded rows of the model, have
    /// no text. An error changes nothing.
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

    /// Appends the text that is held back at the end of the sequence. Incomplete bytes become
    /// U+FFFD. If the sequence continues, call `push` as before.
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

    /// Emits the text that the newest token of the window completes.
    fn advance(&mut self, text: &Text, out: &mut String) -> Result<()> {
        let full = self.decode(text, &self.window)?;
        let Some(seam) = self.seam(&full) else { return self.restart(text, &full, out) };
        self.emit(text, full, seam, out)
    }

    /// Emits `full`, the window's text, from `seam` on, except bytes of incomplete characters.
    fn emit(&mut self, text: &Text, mut full: String, seam: usize, out: &mut String) -> Result<()> {
        let complete = self.complete_len(&full).max(seam);
        let all = complete == full.len();
        out.try_reserve(full.len() - seam)?;
        if all && complete > seam {
            // The tokens of the emitted text suffice as context of the next ones.
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

    /// Returns the position in `full`, the window's text, of the first byte that is not emitted.
    /// Returns None if `full` does not begin with the emitted text.
    fn seam(&self, full: &str) -> Option<usize> {
        if full.starts_with(&self.shown) {
            return Some(self.shown.len());
        }
        // A prompt or an ended sequence stopped within a character, which is now complete.
        let stem = self.shown.trim_end_matches('\u{FFFD}');
        (!full.ends_with('\u{FFFD}') && full.starts_with(stem)).then_some(stem.len())
    }

    /// Handles new bytes that turn an emitted character into errors. If the bytes form a character
    /// themselves, the emitted one may become valid again. Otherwise the bytes are decoded without
    /// it.
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

    /// Returns the index in the window of the first token that is not shown, or of the newest
    /// token.
    fn unshown(&self) -> usize {
        if self.context > 0 { self.context } else { self.window.len().saturating_sub(1) }
    }

    /// Removes the older tokens of the window, and emits bytes that no later token can complete.
    fn cut(&mut self, text: &Text, full: &str, seam: usize, out: &mut String) -> Result<()> {
        let complete = self.complete_len(full).max(seam);
        let start = self.window.len() - CONTEXT;
        let (skipped, mut shown) = self.aligned(text, &self.window[start..])?;
        match shown.strip_suffix(&full[complete..]).map(str::len) {
            Some(len) => {
                shown.truncate(len);
                out.push_str(&full[seam..complete]);
            }
            // Without the older tokens, the held bytes are valid, but the earlier text is already
            // emitted.
            None => out.push_str(&full[seam..]),
        }
        self.window.drain(..start + skipped);
        self.context = self.window.len() - MAX_HELD;
        self.shown = shown;
        Ok(())
    }

    /// Returns how many of the first tokens to drop so that the text does not begin within a
    /// character, and the text of the other tokens.
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

    /// Decodes the last tokens of the prompt, once. `prime` has no tokenizer to do so.
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

    /// Returns the length of the text without the U+FFFD at its end that may still become
    /// characters. Until the last character of a run of fallback bytes is complete, each byte of
    /// the run is decoded to U+FFFD. The first new tokens may therefore change the text of the
    /// context.
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

/// Fallible, because the whole text of a sequence may be appended here.
fn say(text: &str, out: &mut String) -> Result<()> {
    out.try_reserve(text.len())?;
    out.push_str(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::golden_dir;
    use super::*;
    use crate::sys::random::Random;

    fn text(name: &str) -> Text {
        Text::load(&golden_dir().join(name)).unwrap()
    }

    /// Returns the text that a sequence emits. The caller checks the part of `finish`.
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

    /// Returns the tokens of the bytes of a sentencepiece vocabulary.
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

    /// Returns byte runs of whole characters, and runs that begin with an error and fit the window.
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
