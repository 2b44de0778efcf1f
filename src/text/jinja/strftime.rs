//! `datetime.now().strftime(...)` in UTC and the C locale, with the letters of glibc.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::failure::{Result, fail};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
/// Maximum width. A date is shorter.
const MAX_WIDTH: usize = 1_000;

pub fn now(format: &str) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(format, now)
}

pub fn strftime(format: &str, time: Duration) -> Result<String> {
    if format.len() > 1 << 16 {
        return fail(format_args!("the date format is too long ({} bytes, at most 65536); shorten it", format.len()));
    }
    let moment = Moment::new(time);
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let directive = Directive::parse(rest);
        let field = if directive.is_valid() { moment.field(directive.letter, 0) } else { None };
        // glibc does not change invalid directives. Their flags and width apply to a text.
        let field = field.unwrap_or_else(|| Field::Text(rest[..directive.len].to_string(), '\0'));
        out.push_str(&directive.apply(field)?);
        rest = &rest[directive.len..];
    }
    out.push_str(rest);
    Ok(out)
}

/// `%`, flags, a width, a modifier and a letter.
struct Directive {
    flag: Option<char>,
    upper: bool,
    swap: bool,
    width: Option<usize>,
    modifier: Option<char>,
    letter: char,
    len: usize,
}

impl Directive {
    fn parse(text: &str) -> Directive {
        let mut directive = Directive { flag: None, upper: false, swap: false, width: None, modifier: None, letter: '\0', len: 1 };
        let mut chars = text[1..].chars().peekable();
        while let Some(c) = chars.next_if(|c| "_-0^#+".contains(*c)) {
            match c {
                '^' => directive.upper = true,
                '#' => directive.swap = true,
                flag => directive.flag = Some(flag),
            }
            directive.len += 1;
        }
        while let Some(digit) = chars.next_if(char::is_ascii_digit) {
            let digit = digit as usize - '0' as usize;
            directive.width = Some(directive.width.unwrap_or(0).saturating_mul(10).saturating_add(digit));
            directive.len += 1;
        }
        directive.modifier = chars.next_if(|c| "EO".contains(*c));
        directive.len += usize::from(directive.modifier.is_some());
        if let Some(letter) = chars.next() {
            directive.letter = letter;
            directive.len += letter.len_utf8();
        }
        directive
    }

    /// Returns true if glibc supports the modifier for the letter. Python supports `%f` only
    /// without flags, width and modifier.
    fn is_valid(&self) -> bool {
        match self.modifier {
            Some('E') => !"AaBbDdeFfGgHhIjklMmSUVWw".contains(self.letter),
            Some(_) => !"AacDFfXxY".contains(self.letter),
            None => self.letter != 'f' || self.len == "%f".len(),
        }
    }

    fn apply(&self, field: Field) -> Result<String> {
        let width = self.width.unwrap_or(0);
        if width > MAX_WIDTH {
            return fail(format_args!("a width in a date format is too large ({width}, at most {MAX_WIDTH}); lower it"));
        }
        Ok(match field {
            Field::Number(number, digits, fill) => {
                let fill = match self.flag {
                    Some('_') => ' ',
                    Some('0' | '+') => '0',
                    _ => fill,
                };
                let (fill, digits) = if self.flag == Some('-') { (' ', width) } else { (fill, digits.max(width)) };
                pad(&number.to_string(), fill, digits)
            }
            Field::Text(text, letter) => {
                let text = match (self.upper, self.swap) {
                    _ if letter == 'P' => text,
                    (false, true) if letter == 'p' => text.to_ascii_lowercase(),
                    (true, _) => text.to_ascii_uppercase(),
                    (false, true) if "AaBbh".contains(letter) => text.to_ascii_uppercase(),
                    _ => text,
                };
                let fill = if matches!(self.flag, Some('0' | '+')) { '0' } else { ' ' };
                pad(&text, fill, if letter == 'z' { 0 } else { width })
            }
        })
    }
}

/// Returns the text with fill characters before it, `width` bytes in all.
fn pad(text: &str, fill: char, width: usize) -> String {
    let mut padded: String = std::iter::repeat_n(fill, width.saturating_sub(text.len())).collect();
    padded.push_str(text);
    padded
}

enum Field {
    /// A number, its minimum number of digits, and the fill character.
    Number(u64, usize, char),
    Text(String, char),
}

struct Moment {
    seconds: u64,
    micros: u32,
    year: u64,
    month: u64,
    day: u64,
    /// From 0 for Sunday.
    weekday: u64,
    /// From 0 for the first of January.
    day_of_year: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Moment {
    fn new(time: Duration) -> Moment {
        let seconds = time.as_secs();
        let days = seconds / 86_400;
        let (year, month, day) = date(days);
        let day_of_year = day_of_year(year, month, day);
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        Moment { seconds, micros: time.subsec_micros(), year, month, day, weekday: (days + 4) % 7, day_of_year, hour, minute, second }
    }

    /// Returns the field of a letter, or None if glibc does not support it.
    fn field(&self, letter: char, depth: usize) -> Option<Field> {
        let two = |number: u64| Field::Number(number, 2, '0');
        let text = |text: &str| Field::Text(text.to_string(), letter);
        let weekday = DAYS[self.weekday as usize];
        let month = MONTHS[self.month as usize - 1];
        let hour12 = (self.hour + 11) % 12 + 1;
        Some(match letter {
            'Y' => Field::Number(self.year, 0, '0'),
            'C' => two(self.year / 100),
            'y' => two(self.year % 100),
            'G' => Field::Number(self.iso_week().0, 0, '0'),
            'g' => two(self.iso_week().0 % 100),
            'V' => two(self.iso_week().1),
            'U' => two((self.day_of_year + 7 - self.weekday) / 7),
            'W' => two((self.day_of_year + 7 - (self.weekday + 6) % 7) / 7),
            'm' => two(self.month),
            'd' => two(self.day),
            'e' => Field::Number(self.day, 2, ' '),
            'j' => Field::Number(self.day_of_year + 1, 3, '0'),
            'H' => two(self.hour),
            'k' => Field::Number(self.hour, 2, ' '),
            'I' => two(hour12),
            'l' => Field::Number(hour12, 2, ' '),
            'M' => two(self.minute),
            'S' => two(self.second),
            's' => text(&self.seconds.to_string()),
            'f' => Field::Number(self.micros.into(), 6, '0'),
            'u' => Field::Number((self.weekday + 6) % 7 + 1, 0, '0'),
            'w' => Field::Number(self.weekday, 0, '0'),
            'A' => text(weekday),
            'a' => text(&weekday[..3]),
            'B' => text(month),
            'b' | 'h' => text(&month[..3]),
            'p' => text(if self.hour < 12 { "AM" } else { "PM" }),
            'P' => text(if self.hour < 12 { "am" } else { "pm" }),
            // The time has no zone.
            'z' | 'Z' => text(""),
            'n' => text("\n"),
            't' => text("\t"),
            '%' => text("%"),
            'c' => text(&self.all("%a %b %e %H:%M:%S %Y", depth)?),
            'x' | 'D' => text(&self.all("%m/%d/%y", depth)?),
            'X' | 'T' => text(&self.all("%H:%M:%S", depth)?),
            'R' => text(&self.all("%H:%M", depth)?),
            'r' => text(&self.all("%I:%M:%S %p", depth)?),
            'F' => text(&self.all("%Y-%m-%d", depth)?),
            _ => return None,
        })
    }

    /// Formats with plain letters.
    fn all(&self, format: &str, depth: usize) -> Option<String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            match c {
                '%' if depth == 0 => {
                    let directive = Directive::parse(&format!("%{}", chars.next()?));
                    out.push_str(&directive.apply(self.field(directive.letter, depth + 1)?).ok()?);
                }
                c => out.push(c),
            }
        }
        Some(out)
    }

    /// Returns the year and week of ISO 8601. The week of a Thursday belongs to the Thursday's
    /// year.
    fn iso_week(&self) -> (u64, u64) {
        let days = self.seconds / 86_400;
        let thursday = days + 3 - (self.weekday + 6) % 7;
        let (year, month, day) = date(thursday);
        (year, day_of_year(year, month, day) / 7 + 1)
    }
}

/// Returns the day of the year, from 0 for the first of January.
fn day_of_year(year: u64, month: u64, day: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    before + day - 1 + u64::from(leap && month > 2)
}

/// Returns year, month and day of a day since 1970, in the Gregorian calendar.
fn date(days: u64) -> (u64, u64, u64) {
    // Years that begin in March have their leap day last; 400 of them have 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}
