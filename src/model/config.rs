//! JSON files of a model, with range checks of all numbers.

use std::path::Path;

use serde_json::{Map, Value};

use super::remedy;
use crate::error::{Error, Result};
use crate::sys::files;

/// Maximum file size. JSON files of models are much smaller.
const MAX_BYTES: u64 = 16 << 20;

/// A JSON object. Its errors name the file and the field.
#[derive(Debug, Clone, Default)]
pub struct Config {
    file: String,
    fields: Map<String, Value>,
}

impl Config {
    pub fn load(dir: &Path, file: &str) -> Result<Config> {
        Config::load_optional(dir, file)?
            .ok_or_else(|| Error::io(format!("{}: not found; {}", dir.join(file).display(), remedy::for_files_of(dir))))
    }

    pub fn load_optional(dir: &Path, file: &str) -> Result<Option<Config>> {
        let path = dir.join(file);
        let Some(bytes) = files::read(&path, MAX_BYTES)? else { return Ok(None) };
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(fields)) => Ok(Some(Config { file: file.into(), fields })),
            Ok(_) => Err(Error::model(format!("{}: not a JSON object", path.display()))),
            Err(e) => Err(Error::model(format!("{}: not valid JSON: {e}", path.display()))),
        }
    }

    /// Returns a config with these fields. Errors name `file`.
    pub fn new(file: String, fields: Map<String, Value>) -> Config {
        Config { file, fields }
    }

    /// Returns the field, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Returns true if the field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns true if the field is present and null.
    pub fn is_null(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(Value::is_null)
    }

    fn wrong(&self, name: &str, what: &str) -> Error {
        let value = self.get(name).map_or("absent".into(), |value| value.to_string());
        let value: String = value.chars().take(80).collect();
        Error::model(format!("{}: {name} is {value}; {what}", self.file))
    }

    /// Returns a required integer from 1 to `max`.
    pub fn count(&self, name: &str, max: usize) -> Result<usize> {
        let value = self.get(name).and_then(Value::as_u64).filter(|&n| (1..=max as u64).contains(&n));
        value.map(|n| n as usize).ok_or_else(|| self.wrong(name, &format!("it must be an integer from 1 to {max}")))
    }

    pub fn count_or(&self, name: &str, max: usize, default: usize) -> Result<usize> {
        if self.get(name).is_some() { self.count(name, max) } else { Ok(default) }
    }

    /// Like `count_or`, but permits 0.
    pub fn whole_or(&self, name: &str, max: usize, default: usize) -> Result<usize> {
        match self.get(name) {
            Some(Value::Number(number)) if number.as_u64() == Some(0) => Ok(0),
            _ => self.count_or(name, max, default),
        }
    }

    /// Returns a required number above 0.
    pub fn positive(&self, name: &str) -> Result<f64> {
        let value = self.get(name).and_then(Value::as_f64).filter(is_positive);
        value.ok_or_else(|| self.wrong(name, "it must be a number above 0"))
    }

    pub fn positive_or(&self, name: &str, default: f64) -> Result<f64> {
        if self.get(name).is_some() { self.positive(name) } else { Ok(default) }
    }

    /// Returns a number, which is at least 0.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| *number >= 0.0 && (*number as f32).is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(name, "it must be a number of at least 0")),
            },
        }
    }

    pub fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(name, "it must be true or false")),
        }
    }

    pub fn text_or<'a>(&'a self, name: &str, default: &'a str) -> Result<&'a str> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(self.wrong(name, "it must be a string")),
        }
    }

    /// Adds these fields if they are absent.
    pub fn or(mut self, fields: &[(&str, usize)]) -> Config {
        for &(name, value) in fields {
            self.fields.entry(name).or_insert_with(|| value.into());
        }
        self
    }

    /// Sets a field.
    pub fn with(mut self, name: &str, value: usize) -> Config {
        self.fields.insert(name.into(), value.into());
        self
    }

    pub fn list(&self, name: &str) -> Result<Option<&Vec<Value>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(name, "it must be an array")),
        }
    }

    /// Returns a required array of `count` numbers above 0.
    pub fn positives(&self, name: &str, count: usize) -> Result<Vec<f64>> {
        let values = self.list(name)?.map_or(&[][..], Vec::as_slice);
        let numbers: Vec<f64> = values.iter().filter_map(Value::as_f64).filter(is_positive).collect();
        match numbers.len() == values.len() && values.len() == count {
            true => Ok(numbers),
            false => Err(self.wrong(name, &format!("it must be an array of {count} numbers above 0"))),
        }
    }

    /// Returns a nested object.
    pub fn object(&self, name: &str) -> Result<Option<Config>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Config { file: format!("{}: {name}", self.file), fields: fields.clone() })),
            Some(_) => Err(self.wrong(name, "it must be an object")),
        }
    }

    /// Returns the strings of an array, which is empty if the field is absent.
    pub fn texts(&self, name: &str) -> Vec<&str> {
        let values = self.get(name).and_then(Value::as_array);
        values.map_or(Vec::new(), |values| values.iter().filter_map(Value::as_str).collect())
    }

    /// Returns the ids of a field that is a token id or an array of token ids.
    pub fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match self.get(name) {
            None => Some(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(one).collect(),
            Some(value) => one(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong(name, "it must be a token id or an array of them"))
    }
}

/// Returns true if the number is above 0 and remains normal when it is rounded to f32.
fn is_positive(number: &f64) -> bool {
    *number > 0.0 && (*number as f32).is_normal()
}

#[cfg(test)]
impl Config {
    pub fn from_json(json: Value) -> Config {
        let Value::Object(fields) = json else { panic!("not an object") };
        Config::new("config.json".into(), fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_names_a_number_out_of_range_with_its_value_and_range() {
        let config = Config::from_json(json!({"layers": 1u64 << 40, "heads": 0, "eps": "x", "width": -3}));
        let message = |result: Result<usize>| result.unwrap_err().message().to_string();
        assert_eq!(message(config.count("layers", 1024)), "config.json: layers is 1099511627776; it must be an integer from 1 to 1024");
        assert!(message(config.count("heads", 8)).contains("heads is 0"));
        assert!(message(config.count("width", 8)).contains("width is -3"));
        assert!(message(config.count("missing", 8)).contains("missing is absent"));
        assert!(config.positive("eps").is_err());
    }

    #[test]
    fn token_ids_are_a_number_or_a_list() {
        let config = Config::from_json(json!({"one": 2, "many": [2, 3], "none": null, "bad": -1}));
        assert_eq!(config.token_ids("one").unwrap(), [2]);
        assert_eq!(config.token_ids("many").unwrap(), [2, 3]);
        assert!(config.token_ids("none").unwrap().is_empty());
        assert!(config.token_ids("bad").is_err());
    }
}
