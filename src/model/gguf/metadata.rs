//! The header of a GGUF file: values by key, and descriptions of tensors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};

use crate::error::{Error, Result, try_vec};

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the types of the format
pub enum Value {
    Integer(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Flags(Vec<bool>),
    Texts(Vec<String>),
}

/// The values of a file by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata(pub(super) BTreeMap<String, Value>);

impl Metadata {
    /// Returns a value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Returns a whole number from 0 to `max`, or `None` if the key is missing.
    pub fn whole(&self, key: &str, max: usize) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Integer(number)) if (0..=max as i128).contains(&number) => Ok(Some(number as usize)),
            Some(Value::Integer(number)) => Err(Error::model(format!("{key} is {number}; must be 0 to {max}"))),
            Some(_) => Err(Error::model(format!("{key} is not a whole number"))),
        }
    }

    /// Returns a finite number, or `None` if the key is missing.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Float(number)) if number.is_finite() => Ok(Some(number)),
            Some(&Value::Integer(number)) => Ok(Some(number as f64)),
            Some(_) => Err(Error::model(format!("{key} is not a finite number"))),
        }
    }

    /// Returns a flag, or `None` if the key is missing.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Flag(flag)) => Ok(Some(*flag)),
            Some(other) => Err(Error::model(format!("{key} is not a flag ({other:?})"))),
        }
    }

    /// Returns a text, or `None` if the key is missing.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(Error::model(format!("{key} is not a text"))),
        }
    }
}

/// Maximum nesting and number of dimensions, by the format.
pub(super) const MAX_DIMENSIONS: u32 = 4;

/// Reads a header from its start. No length that the file states is trusted: a text or a list that
/// is longer than the rest of the file is an error before memory is reserved.
pub(super) struct Header<'a> {
    source: BufReader<&'a File>,
    /// Position in the file.
    pub position: u64,
    len: u64,
}

impl<'a> Header<'a> {
    pub fn new(file: &'a File, len: u64) -> Header<'a> {
        Header { source: BufReader::new(file), position: 0, len }
    }

    /// Returns an error unless this many items of at least `bytes` bytes fit into the rest of the
    /// file.
    pub fn check_rest(&self, what: &str, count: u64, bytes: u64) -> Result<usize> {
        let rest = self.len - self.position;
        match count.checked_mul(bytes) {
            Some(needed) if needed <= rest => Ok(count as usize),
            _ => Err(Error::model(format!(
                "{what} at byte {} has {count} items of at least {bytes} bytes, and the file ends after {rest} bytes; download the file again",
                self.position
            ))),
        }
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.check_rest(what, 1, N as u64)?;
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.source
            .read_exact(bytes)
            .map_err(|error| Error::io(format!("cannot read {} bytes at {}: {error}", bytes.len(), self.position)))?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    pub fn text(&mut self, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let len = self.check_rest(what, len, 1)?;
        let mut bytes = try_vec(len, 0u8)?;
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| Error::model(format!("{what} before byte {} is not UTF-8", self.position)))
    }

    pub fn value(&mut self, key: &str) -> Result<Value> {
        Ok(match self.u32(key)? {
            FLOAT32 => Value::Float(f32::from_le_bytes(self.bytes(key)?).into()),
            FLOAT64 => Value::Float(f64::from_le_bytes(self.bytes(key)?)),
            BOOL => Value::Flag(self.flag(key)?),
            TEXT => Value::Text(self.text(key)?),
            LIST => self.list(key)?,
            kind => Value::Integer(self.integer(key, kind)?),
        })
    }

    fn flag(&mut self, key: &str) -> Result<bool> {
        match self.bytes(key)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(Error::model(format!("{key} is a bool with the byte {byte}; must be 0 or 1"))),
        }
    }

    fn integer(&mut self, key: &str, kind: u32) -> Result<i128> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.bytes(key)?).into(),
            1 => i8::from_le_bytes(self.bytes(key)?).into(),
            2 => u16::from_le_bytes(self.bytes(key)?).into(),
            3 => i16::from_le_bytes(self.bytes(key)?).into(),
            4 => u32::from_le_bytes(self.bytes(key)?).into(),
            5 => i32::from_le_bytes(self.bytes(key)?).into(),
            10 => u64::from_le_bytes(self.bytes(key)?).into(),
            11 => i64::from_le_bytes(self.bytes(key)?).into(),
            _ => return Err(Error::model(format!("{key} has the type {kind}; must be 0 to 12"))),
        })
    }

    fn list(&mut self, key: &str) -> Result<Value> {
        let (kind, count) = (self.u32(key)?, self.u64(key)?);
        let item_bytes = match kind {
            0 | 1 | BOOL => 1,
            2 | 3 => 2,
            4 | 5 | FLOAT32 => 4,
            TEXT | 10 | 11 | FLOAT64 => 8,
            LIST => return Err(Error::unsupported(format!("{key} is a list of lists; supported are lists of numbers and of texts"))),
            _ => return Err(Error::model(format!("{key} is a list of the type {kind}; must be 0 to 12"))),
        };
        let count = self.check_rest(key, count, item_bytes)?;
        match kind {
            FLOAT32 => self.items(count, |header| Ok(f32::from_le_bytes(header.bytes(key)?))).map(Value::Floats),
            FLOAT64 => self.items(count, |header| Ok(f64::from_le_bytes(header.bytes(key)?) as f32)).map(Value::Floats),
            BOOL => self.items(count, |header| header.flag(key)).map(Value::Flags),
            TEXT => self.items(count, |header| header.text(key)).map(Value::Texts),
            _ => self.items(count, |header| header.small_integer(key, kind)).map(Value::Integers),
        }
    }

    fn small_integer(&mut self, key: &str, kind: u32) -> Result<i64> {
        let number = self.integer(key, kind)?;
        i64::try_from(number).map_err(|_| Error::model(format!("an item of {key} is {number}, which is larger than {}", i64::MAX)))
    }

    fn items<T>(&mut self, count: usize, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        items.try_reserve_exact(count)?;
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }
}

/// Types of values that are no integers.
const FLOAT32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;
const FLOAT64: u32 = 12;
