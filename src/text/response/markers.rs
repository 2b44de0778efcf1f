//! Finds markers in a text that arrives character by character.

/// The suffix of the text that can still become a marker.
#[derive(Debug, Default)]
pub struct Held {
    text: String,
}

/// What one more character decides.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// The text up to here is no marker, except a suffix that is held.
    Text,
    /// The marker with this index has ended.
    Marker(usize),
}

impl Held {
    /// Advances by `c`. Appends to `plain` the text that belongs to no marker. If one marker is the
    /// beginning of another, the shorter one is found.
    pub fn push<'a>(&mut self, c: char, markers: impl Iterator<Item = &'a str> + Clone, plain: &mut String) -> Found {
        if self.text.is_empty() && !markers.clone().any(|marker| marker.starts_with(c)) {
            plain.push(c);
            return Found::Text;
        }
        self.text.push(c);
        let mut start = 0;
        while start < self.text.len() {
            let rest = &self.text[start..];
            if let Some(i) = markers.clone().position(|marker| marker == rest) {
                plain.push_str(&self.text[..start]);
                self.text.clear();
                return Found::Marker(i);
            }
            if markers.clone().any(|marker| marker.starts_with(rest)) {
                break;
            }
            start += rest.chars().next().map_or(1, char::len_utf8);
        }
        plain.push_str(&self.text[..start]);
        self.text.drain(..start);
        Found::Text
    }

    /// Appends the held text, which did not become a marker.
    pub fn flush(&mut self, plain: &mut String) {
        plain.push_str(&self.text);
        self.text.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}
