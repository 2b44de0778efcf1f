//! Where a text may be cut so that the tokens of its pieces are the tokens of the whole.
//!
//! The `tokenizers` crate holds some hundred bytes for each byte of a text. A text is therefore cut at places where a cut cannot
//! change the tokens. `a|b` means a cut between the characters a and b. Each rule below needs all of this:
//!
//! - The normalizer treats both sides alone: it is empty, NFC (b is a boundary of NFC), or replaces each space. With NFC, a and b
//!   are characters that it leaves as they are.
//! - Either the pre-tokenizer always ends a word at `a|b`, and finds the same words on each side alone (see [`words`]), or no token
//!   of a BPE model joins a and b (see [`symbols`]).
//! - No added token contains a and b side by side, and none depends on what lies across the cut (see [`Cuts::protect`]).
//!
//! Pieces get no special tokens. The caller adds those of the post-processor once.

use std::collections::HashSet;

use serde_json::Value as Json;
use tokenizers::AddedToken;

use super::check::{self, PipelinePart};

/// Bytes of a piece once the normalizer and the pre-tokenizer have made it as long as they can.
const PIECE_BYTES: u64 = 64 << 10;
/// The same for a stretch without a place to cut.
const STRETCH_BYTES: u64 = 2 << 20;

/// Splits by expressions whose matches have these properties: none contains a space after another character that is not white
/// space, or a line break or `PUNCTUATION` after a letter; all of these characters are matched; nothing looks behind, and only
/// white space looks ahead (`\s+(?!\S)`), at most to the next character.
const WORDS: [&str; 7] = [
    // GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Llama 3, GPT-4
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-4o, gpt-oss, Llama 4
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // Mistral
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // DeepSeek V3
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // The example model
    r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Splits by runs of some digits or letters. A run ends at each of the cuts above.
const RUNS: [&str; 5] = [r"\p{N}{1,3}", r"\p{N}", "[0-9]", "[0-9][0-9][0-9]", "[一-龥぀-ゟ゠-ヿ]+"];

/// Neither a letter, a digit, white space, an apostrophe nor an underscore for any of the expressions above.
const PUNCTUATION: &str = "!\"#$%&()*+,-./:;<=>?@[\\]^`{|}~。，、！？；：";

/// The places where a text may be cut.
#[derive(Debug)]
pub(super) struct Cuts {
    rule: Rule,
    /// The normalizer writes a prefix where a piece begins: it stands for the space at the cut, which is left out.
    drop_space: bool,
    nfc: bool,
    /// Bytes after which the next place is looked for.
    pub piece: usize,
    /// Most bytes without a place to cut.
    pub max_stretch: usize,
    joined: HashSet<(char, char)>,
    never_before: HashSet<char>,
    never_after: HashSet<char>,
}

#[derive(Debug)]
enum Rule {
    /// No cut is proven.
    Whole,
    /// The pre-tokenizer ends a word at `a| ` if a is not white space. If `letters`, also at `a|b` if a is a letter and b is a
    /// line break or `PUNCTUATION`.
    Words {
        letters: bool,
    },
    Symbols(Symbols),
}

/// A BPE model that gets the whole text as one word. Each symbol begins as one character of the text, so a merge across `a|b` makes
/// a token that contains a and b side by side. If there is none, the merges on both sides do not depend on each other.
#[derive(Debug)]
struct Symbols {
    /// What stands for a space once the text is normalized.
    space: char,
    /// Cuts before line breaks, if no prefix would be written there.
    newline: bool,
    /// Tokens of one character. Others become bytes or the unknown token, which can join.
    single: HashSet<char>,
    /// Characters before `space` in a token, and before a line break.
    before_space: HashSet<char>,
    before_newline: HashSet<char>,
}

/// What the normalizer does, as far as cuts depend on it.
struct Normalized {
    /// What stands for a space.
    space: char,
    prefix: bool,
    nfc: bool,
}

impl Cuts {
    /// `expansion` is how many times longer the normalizer and the pre-tokenizer can make a text.
    pub fn new(file: &Json, expansion: u64) -> Result<Cuts, String> {
        let normalizers = check::parts(&file["normalizer"], "normalizer", "normalizers")?;
        let pre_tokenizers = check::parts(&file["pre_tokenizer"], "pre_tokenizer", "pretokenizers")?;
        let normalized = normalized(&normalizers);
        let rule = normalized.as_ref().and_then(|normalized| {
            words(&pre_tokenizers, normalized).or_else(|| symbols(&file["model"], &pre_tokenizers, normalized).map(Rule::Symbols))
        });
        Ok(Cuts {
            rule: rule.unwrap_or(Rule::Whole),
            drop_space: normalized.as_ref().is_some_and(|normalized| normalized.prefix),
            nfc: normalized.is_some_and(|normalized| normalized.nfc),
            piece: (PIECE_BYTES / expansion).clamp(1 << 10, 32 << 10) as usize,
            max_stretch: (STRETCH_BYTES / expansion) as usize,
            joined: HashSet::new(),
            never_before: HashSet::new(),
            never_after: HashSet::new(),
        })
    }

    /// Keeps cuts away from an added token, as the file writes it and as it is normalized.
    ///
    /// If no occurrence of a token lies across a cut, the leftmost longest matches on both sides are those of the whole text. What
    /// a token does beyond its own characters: with `rstrip` it takes the white space after it, so there is no cut after its last
    /// character; with `single_word` it looks at the character before it, so there is no cut before its first one. (`lstrip` takes
    /// white space before it, up to a cut at most: the character before a cut is not white space. The character after a cut is
    /// not part of a word.) A token that is found before the normalizer runs ends the text before it, and the text after it gets a
    /// prefix of its own: where a prefix has to stand for the space at the cut, no such token may touch the cut.
    pub fn protect(&mut self, token: &AddedToken, normalized: &str) {
        let spaced = normalized.replace('\u{2581}', " ");
        for content in [&token.content, normalized, &spaced] {
            self.joined.extend(content.chars().zip(content.chars().skip(1)));
            if token.rstrip {
                self.never_after.extend(content.chars().next_back());
            }
            if token.single_word {
                self.never_before.extend(content.chars().next());
            }
        }
        if self.drop_space && !token.normalized {
            self.never_before.extend(token.content.chars().next());
            self.never_after.extend(token.content.chars().next_back());
        }
    }

    /// The end of the piece that begins at `start`, and where the next piece begins, which is the end of the text after the last
    /// piece. The piece has at least `piece` bytes, unless the text ends.
    ///
    /// # Errors
    /// The length of a stretch that is too long and without a place to cut.
    pub fn next(&self, text: &str, start: usize, piece: usize) -> Result<(usize, usize), usize> {
        let mut from = text.len().min(start + piece.max(1));
        while !text.is_char_boundary(from) {
            from += 1;
        }
        let mut before = text[start..from].chars().next_back();
        let mut rest = text[from..].char_indices().peekable();
        while let Some((at, b)) = rest.next() {
            let after = rest.peek().map(|&(_, after)| after);
            if before.is_some_and(|a| self.allows(a, b, after)) {
                let end = from + at;
                return Ok((end, end + usize::from(self.drop_space)));
            }
            if from + at - start > self.max_stretch {
                break;
            }
            before = Some(b);
        }
        let length = text.len() - start;
        if length > self.max_stretch { Err(length) } else { Ok((text.len(), text.len())) }
    }

    fn allows(&self, a: char, b: char, after: Option<char>) -> bool {
        if a.is_whitespace() || a == '\u{2581}' || !self.proven(a, b) {
            return false;
        }
        // A mark before the cut may be composed, and so may a sign with the mark after it.
        if self.nfc && (!(a.is_ascii() || is_letter(a) || PUNCTUATION.contains(a)) || "<=>".contains(b)) {
            return false;
        }
        // The piece after a dropped space begins with the character after it.
        if self.drop_space && !after.is_some_and(|after| !after.is_whitespace() && !self.never_before.contains(&after)) {
            return false;
        }
        !self.joined.contains(&(a, b)) && !self.never_after.contains(&a) && !self.never_before.contains(&b)
    }

    fn proven(&self, a: char, b: char) -> bool {
        match &self.rule {
            Rule::Whole => false,
            Rule::Words { letters } => b == ' ' || *letters && is_letter(a) && (b == '\n' || PUNCTUATION.contains(b)),
            Rule::Symbols(symbols) => symbols.are_apart(a, b),
        }
    }
}

impl Symbols {
    fn are_apart(&self, a: char, b: char) -> bool {
        let joining = match b {
            ' ' => &self.before_space,
            '\n' if self.newline => &self.before_newline,
            _ => return false,
        };
        a != self.space && self.single.contains(&a) && !joining.contains(&a)
    }
}

/// Letters of every version of Unicode, which the expressions above match by `\p{L}`.
fn is_letter(c: char) -> bool {
    matches!(c, 'a'..='z' | 'A'..='Z' | 'А'..='я' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='龥' | '가'..='힣')
}

fn normalized(parts: &[PipelinePart]) -> Option<Normalized> {
    let mut found = Normalized { space: ' ', prefix: false, nfc: false };
    for (_, kind, part) in parts {
        match *kind {
            "NFC" => found.nfc = true,
            "Replace" if part["pattern"]["String"] == " " && part["content"] == "\u{2581}" => found.space = '\u{2581}',
            "Prepend" if part["prepend"] == "\u{2581}" && !found.prefix => found.prefix = true,
            _ => return None,
        }
    }
    // A prefix stands for a space only if both become the same character.
    (!found.prefix || found.space == '\u{2581}').then_some(found)
}

/// The rule if the pre-tokenizer ends words at spaces: some splits by runs, then a split into words, then anything that works on
/// each word alone.
fn words(parts: &[PipelinePart], normalized: &Normalized) -> Option<Rule> {
    if normalized.prefix {
        return None;
    }
    for (_, kind, part) in parts {
        match *kind {
            "Digits" => {}
            "Punctuation" if matches!(part["behavior"].as_str(), None | Some("Isolated" | "Contiguous" | "Removed")) => {}
            "Split" if is_split(part, &RUNS) => {}
            "Metaspace" if part["split"] != false => {
                let fits = normalized.space == ' ' || part["replacement"] == "\u{2581}";
                return (fits && parts.len() == 1).then_some(Rule::Words { letters: false });
            }
            _ if normalized.space != ' ' => return None,
            "Split" if is_split(part, &WORDS) => return works_on_words(parts).then_some(Rule::Words { letters: true }),
            // A prefix would be written before a piece that does not begin with a space.
            "ByteLevel" if part["use_regex"] != false => {
                return works_on_words(parts).then_some(Rule::Words { letters: part["add_prefix_space"] == false });
            }
            "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" => {
                return works_on_words(parts).then_some(Rule::Words { letters: false });
            }
            _ => return None,
        }
    }
    None
}

/// Metaspace can depend on where a word stands in the text. All others do not.
fn works_on_words(parts: &[PipelinePart]) -> bool {
    parts.iter().all(|(_, kind, _)| *kind != "Metaspace")
}

/// Whether this part splits by an expression whose searches take time in proportion to the text.
pub(super) fn is_known_split(part: &Json) -> bool {
    is_split(part, &WORDS) || is_split(part, &RUNS)
}

fn is_split(part: &Json, expressions: &[&str]) -> bool {
    let Some(regex) = part["pattern"]["Regex"].as_str() else { return false };
    let regex = regex.replace('\r', r"\r").replace('\n', r"\n");
    part["behavior"] == "Isolated" && part["invert"] == false && expressions.contains(&regex.as_str())
}

/// The rule if a BPE model gets the whole text as one word.
fn symbols(model: &Json, parts: &[PipelinePart], normalized: &Normalized) -> Option<Symbols> {
    let (space, newline) = match parts {
        [] => (normalized.space, !normalized.prefix),
        // No space is left for it.
        [(_, "Split", part)] if part["pattern"]["String"] == " " && normalized.space != ' ' => (normalized.space, !normalized.prefix),
        // A prefix would be written before a piece that does not begin with a space.
        [(_, "Metaspace", part)] if part["split"] == false && part["replacement"] == "\u{2581}" && !normalized.prefix => {
            ('\u{2581}', part["prepend_scheme"] == "never")
        }
        _ => return None,
    };
    let affix = |name: &str| !model[name].as_str().unwrap_or_default().is_empty();
    let plain = !affix("continuing_subword_prefix") && !affix("end_of_word_suffix") && model["ignore_merges"] != true;
    // NFC can compose the character before a cut.
    if !plain || normalized.nfc || model.get("merges").is_none() {
        return None;
    }
    let mut found = Symbols { space, newline, single: HashSet::new(), before_space: HashSet::new(), before_newline: HashSet::new() };
    for token in model["vocab"].as_object()?.keys() {
        let mut chars = token.chars();
        if let (Some(c), None) = (chars.next(), chars.next()) {
            found.single.insert(c);
        }
        for (a, b) in token.chars().zip(token.chars().skip(1)) {
            if b == found.space {
                found.before_space.insert(a);
            } else if b == '\n' {
                found.before_newline.insert(a);
            }
        }
    }
    found.newline &= found.single.contains(&'\n');
    found.single.contains(&found.space).then_some(found)
}

#[cfg(test)]
mod tests;
