//! Binds the arguments of a call to parameters as Python does.

use super::MAX_WIDTH;
use super::budget::Buffer;
use super::failure::{Failure, Result, fail};
use super::value::{Text, Value};

#[derive(Debug)]
pub struct Args {
    pub positional: Buffer<Value>,
    pub named: Buffer<(Text, Value)>,
}

impl Args {
    pub fn new(positional: Buffer<Value>) -> Args {
        Args { named: Buffer::new(positional.budget()), positional }
    }

    pub fn copy(&self) -> Result<Args> {
        let mut copy = Args::new(Buffer::new(self.positional.budget()));
        copy.positional.extend(self.positional.iter().cloned())?;
        copy.named.extend(self.named.iter().cloned())?;
        Ok(copy)
    }

    /// Returns the arguments by parameter. A parameter with an empty name can only be given by
    /// position. The first `required` parameters must be given.
    pub fn bind<const N: usize>(&self, function: &str, parameters: [&str; N], required: usize) -> Result<[Option<Value>; N]> {
        if self.positional.len() > N {
            return fail(format_args!("{function}() takes at most {N} arguments ({} given)", self.positional.len()));
        }
        let mut bound = std::array::from_fn(|i| self.positional.get(i).cloned());
        for (name, value) in self.named.iter() {
            let name = name.as_str();
            let Some(index) = parameters.iter().position(|parameter| !name.is_empty() && *parameter == name) else {
                return fail(format_args!("{function}() got an unexpected keyword argument '{name}'"));
            };
            if bound[index].replace(value.clone()).is_some() {
                return fail(format_args!("{function}() got multiple values for argument '{name}'"));
            }
        }
        match bound[..required].iter().position(Option::is_none) {
            Some(missing) => fail(format_args!("{function}() is missing the required argument {} ({})", missing + 1, parameters[missing])),
            None => Ok(bound),
        }
    }

    /// Charges the budget for reading the strings among the arguments.
    pub fn scan(&self) -> Result<()> {
        let values = self.positional.iter().chain(self.named.iter().map(|(_, value)| value));
        let bytes = values.map(|value| value.as_str().map_or(0, str::len)).fold(0, usize::saturating_add);
        self.positional.budget().scan(bytes)
    }

    /// Fails if there are any arguments.
    pub fn none(&self, function: &str) -> Result<()> {
        self.bind::<0>(function, [], 0).map(drop)
    }
}

/// Returns an optional argument. `none` selects its default.
pub fn given(argument: Option<Value>) -> Option<Value> {
    argument.filter(|value| !matches!(value, Value::None))
}

/// Returns an argument that must be an integer.
pub fn integer(argument: &Value) -> Result<i128> {
    match argument.defined()?.as_int() {
        Some(number) => Ok(number),
        None => fail(format_args!("'{}' object cannot be interpreted as an integer", argument.type_name())),
    }
}

/// Returns an argument that must be a string.
pub fn string(argument: &Value) -> Result<&str> {
    match argument.defined()?.as_str() {
        Some(text) => Ok(text),
        None => fail(format_args!("a str is required, not '{}'", argument.type_name())),
    }
}

/// Returns `argument` as text, or nothing for `none`.
pub fn optional_text(argument: &Option<Value>) -> Result<Option<&str>> {
    argument.as_ref().filter(|value| !matches!(value, Value::None)).map(string).transpose()
}

/// Returns a size that a template requests. A size beyond the budget is refused where it is used.
pub fn size(number: i128) -> usize {
    usize::try_from(number.max(0)).unwrap_or(usize::MAX)
}

/// Returns a padding width in characters. A negative width is 0.
pub fn width(number: i128) -> Result<usize> {
    if number > MAX_WIDTH as i128 {
        return Err(Failure::limit(format_args!("a width is too large ({number}, at most {MAX_WIDTH}); pad less")));
    }
    Ok(size(number))
}
