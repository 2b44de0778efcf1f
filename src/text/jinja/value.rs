//! The values of a template: those of Python, and those of Jinja.
//!
//! Lists, tuples and dictionaries are immutable, as in transformers' sandbox. Mutable objects
//! (namespaces, iterators, scopes of macros) are in the interpreter, and values refer to them by
//! number. Values therefore form no cycles, and all memory is freed when a rendering ends.

use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use indexmap::IndexMap;

use super::MAX_VALUE_DEPTH;
use super::budget::{Buffer, Builder, Lease, RenderBudget, SCANNED_BYTES_PER_STEP};
use super::failure::{Failure, Result, fail};
use super::globals::Global;

#[derive(Debug, Clone)]
pub enum Value {
    /// The reason why the value is not defined.
    Undefined(Text),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    List(Items),
    Tuple(Items),
    Dict(Dict),
    /// `dict.keys()`, `dict.values()` and `dict.items()`
    View(View, Dict),
    Range(Range),
    Slice(Rc<[Value; 3]>),
    Global(Global),
    Method(Rc<Method>),
    /// An object of the interpreter.
    Object(Object, usize),
}

/// A method of a value, which is called later.
#[derive(Debug)]
pub struct Method {
    pub value: Value,
    pub name: &'static str,
    _lease: Lease,
}

/// Objects that change, by the number of their state in the interpreter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    Namespace,
    Iterator,
    Macro,
    Loop,
    Cycler,
    Joiner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    Keys,
    Values,
    Items,
}

impl View {
    /// Returns the view that the method of this name returns.
    pub fn named(method: &str) -> Option<View> {
        match method {
            "keys" => Some(View::Keys),
            "values" => Some(View::Values),
            "items" => Some(View::Items),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub start: i128,
    pub stop: i128,
    pub step: i128,
}

impl Range {
    pub fn len(&self) -> usize {
        let (first, end) = if self.step > 0 { (self.start, self.stop) } else { (self.stop, self.start) };
        let span = end.saturating_sub(first);
        let step = self.step.saturating_abs();
        if span <= 0 { 0 } else { usize::try_from((span - 1) / step + 1).unwrap_or(usize::MAX) }
    }

    pub fn at(&self, index: usize) -> i128 {
        self.start.saturating_add(self.step.saturating_mul(index as i128))
    }

    pub fn get(&self, index: usize) -> Value {
        Value::Int(self.at(index))
    }
}

/// A string. HTML-safe strings (`|escape`, `|safe`) escape strings that are added to them.
#[derive(Debug, Clone)]
pub struct Text(Rc<TextParts>);

#[derive(Debug)]
struct TextParts {
    text: Box<str>,
    safe: bool,
    _lease: Lease,
}

impl Text {
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    pub fn is_safe(&self) -> bool {
        self.0.safe
    }
}

/// The items of a list or a tuple.
#[derive(Debug, Clone)]
pub struct Items(Rc<ItemsParts>);

#[derive(Debug)]
struct ItemsParts {
    items: Buffer<Value>,
    depth: usize,
    weight: usize,
}

impl std::ops::Deref for Items {
    type Target = [Value];
    fn deref(&self) -> &[Value] {
        &self.0.items
    }
}

impl Items {
    pub fn same(&self, other: &Items) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

#[derive(Debug, Clone)]
pub struct Dict(Rc<DictParts>);

#[derive(Debug)]
struct DictParts {
    entries: Entries,
    depth: usize,
    weight: usize,
}

impl std::ops::Deref for Dict {
    type Target = Entries;
    fn deref(&self) -> &Entries {
        &self.0.entries
    }
}

/// The entries of a dictionary or a namespace. Their bytes are charged as they grow.
#[derive(Debug)]
pub struct Entries {
    map: IndexMap<Key, Value>,
    lease: Lease,
}

impl Entries {
    /// Size of an entry in bytes: key, value, hash, and its share of a table that is at least 7/16
    /// full.
    const BYTES: usize = size_of::<(Key, Value)>() + 40;

    pub fn new(budget: &Rc<RenderBudget>) -> Result<Entries> {
        Ok(Entries { map: IndexMap::new(), lease: budget.lease(192)? })
    }

    pub fn insert(&mut self, key: Key, value: Value) -> Result<()> {
        self.reserve(1)?;
        self.map.insert(key, value);
        Ok(())
    }

    /// Adds the entries of a dictionary.
    pub fn extend(&mut self, dict: &Dict) -> Result<()> {
        self.reserve(dict.len())?;
        self.map.extend(dict.iter().map(|(key, value)| (key.clone(), value.clone())));
        Ok(())
    }

    fn reserve(&mut self, more: usize) -> Result<()> {
        let capacity = self.map.capacity();
        if self.map.len() + more > capacity {
            let grown = 2 * capacity.max(self.map.len() + more) + 3;
            self.lease.grow(capacity * Self::BYTES, grown * Self::BYTES, || self.map.try_reserve(more))?;
            self.lease.grow(grown * Self::BYTES, self.map.capacity() * Self::BYTES, || Ok::<(), Infallible>(()))?;
        }
        Ok(())
    }

    /// Returns the value of a key that is a string.
    pub fn get_str(&self, key: &str) -> Option<&Value> {
        self.map.get(&StrKey(key))
    }
}

impl std::ops::Deref for Entries {
    type Target = IndexMap<Key, Value>;
    fn deref(&self) -> &IndexMap<Key, Value> {
        &self.map
    }
}

impl Dict {
    pub fn same(&self, other: &Dict) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

/// A string that finds a `Key` without becoming a value.
struct StrKey<'a>(&'a str);

impl Hash for StrKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl indexmap::Equivalent<Key> for StrKey<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(&key.0, Value::Str(text) if text.as_str() == self.0)
    }
}

/// A value that a dictionary can have as a key: 1, 1.0 and true are the same key.
#[derive(Debug, Clone)]
pub struct Key(Value);

impl Key {
    pub fn new(value: Value) -> Result<Key> {
        fn hashable(value: &Value) -> bool {
            match value {
                Value::List(_) | Value::Dict(_) | Value::Slice(_) => false,
                Value::View(view, _) => *view == View::Values,
                Value::Tuple(items) => items.iter().all(hashable),
                _ => true,
            }
        }
        if hashable(&value) { Ok(Key(value)) } else { fail(format_args!("unhashable type: '{}'", value.type_name())) }
    }

    pub fn value(&self) -> &Value {
        &self.0
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0.equals(&other.0)
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        hash(&self.0, state);
    }
}

/// Hashes a value that equals no value, such as NaN. If many such values shared a hash, a search
/// would compare all of them.
fn unequaled<H: Hasher>(state: &mut H) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed).hash(state);
}

fn hash<H: Hasher>(value: &Value, state: &mut H) {
    match value {
        Value::Str(text) => text.as_str().hash(state),
        Value::Bool(flag) => (*flag as i128).hash(state),
        Value::Int(number) => number.hash(state),
        Value::Float(number) if number.fract() == 0.0 && number.abs() < 1e38 => (*number as i128).hash(state),
        Value::Float(number) if number.is_nan() => unequaled(state),
        Value::Float(number) => number.to_bits().hash(state),
        // With the length, tuples with the same items in other nesting have other hashes.
        Value::Tuple(items) => {
            items.len().hash(state);
            items.iter().for_each(|item| hash(item, state));
        }
        Value::Object(_, number) => number.hash(state),
        Value::Range(range) => match range.len() {
            0 => 0.hash(state),
            1 => (1, range.start).hash(state),
            len => (len, range.start, range.step).hash(state),
        },
        Value::Method(method) => hash(&method.value, state),
        Value::View(View::Values, _) => unequaled(state),
        _ => 0.hash(state),
    }
}

impl Value {
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(text) if text.is_safe() => "Markup",
            Value::Str(_) => "str",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::View(View::Keys, _) => "dict_keys",
            Value::View(View::Values, _) => "dict_values",
            Value::View(View::Items, _) => "dict_items",
            Value::Range(_) => "range",
            Value::Slice(_) => "slice",
            Value::Global(_) => "function",
            Value::Method(_) => "builtin_function_or_method",
            Value::Object(Object::Namespace, _) => "Namespace",
            Value::Object(Object::Iterator, _) => "generator",
            Value::Object(Object::Macro, _) => "Macro",
            Value::Object(Object::Loop, _) => "LoopContext",
            Value::Object(Object::Cycler, _) => "Cycler",
            Value::Object(Object::Joiner, _) => "Joiner",
        }
    }

    /// Fails if the value is undefined, with the reason.
    pub fn defined(&self) -> Result<&Value> {
        match self {
            Value::Undefined(reason) => Err(Failure::new(reason.as_str())),
            value => Ok(value),
        }
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text.as_str()),
            _ => None,
        }
    }

    /// Returns the value as an index, if it is an integer or a boolean.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(flag) => Some(*flag as i128),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(*number),
            value => value.as_int().map(|number| number as f64),
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(flag) => *flag,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Str(text) => !text.as_str().is_empty(),
            Value::List(items) | Value::Tuple(items) => !items.is_empty(),
            Value::Dict(dict) | Value::View(_, dict) => !dict.is_empty(),
            Value::Range(range) => range.len() > 0,
            _ => true,
        }
    }

    /// Compares like Python's `==`.
    pub fn equals(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => a.as_str() == b.as_str(),
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                a.same(b) || (a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.equals(b)))
            }
            (Value::Dict(a), Value::Dict(b)) => a.same(b) || equal_dicts(a, b),
            (Value::View(View::Keys, a), Value::View(View::Keys, b)) => a.len() == b.len() && a.keys().all(|key| b.contains_key(key)),
            (Value::View(View::Items, a), Value::View(View::Items, b)) => equal_dicts(a, b),
            (Value::Range(a), Value::Range(b)) => {
                let same_first = a.len() == 0 || a.start == b.start;
                a.len() == b.len() && same_first && (a.len() < 2 || a.step == b.step)
            }
            (Value::Global(a), Value::Global(b)) => a == b,
            (Value::Object(a, i), Value::Object(b, k)) => a == b && i == k,
            (Value::Method(a), Value::Method(b)) => a.name == b.name && a.value.equals(&b.value),
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => self.as_float().zip(other.as_float()).is_some_and(|(a, b)| a == b),
            },
        }
    }

    /// Compares like Python's `is`, where the result does not depend on Python's storage.
    pub fn same(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::None, Value::None) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a == b,
            (Value::Str(a), Value::Str(b)) => Rc::ptr_eq(&a.0, &b.0) || a.as_str() == b.as_str(),
            (Value::List(a), Value::List(b)) => a.same(b),
            (Value::Tuple(a), Value::Tuple(b)) => a.same(b) || (a.is_empty() && b.is_empty()),
            (Value::Dict(a), Value::Dict(b)) => a.same(b),
            (Value::Undefined(a), Value::Undefined(b)) => Rc::ptr_eq(&a.0, &b.0),
            (Value::Global(_) | Value::Object(..), _) => self.equals(other),
            _ => false,
        }
    }

    /// Returns the number of steps for reading the whole value. A repeated part counts each time,
    /// so that the number bounds recursion.
    pub fn weight(&self) -> usize {
        match self {
            Value::Str(text) => 1 + text.as_str().len() / SCANNED_BYTES_PER_STEP,
            Value::List(items) | Value::Tuple(items) => items.0.weight,
            Value::Dict(dict) | Value::View(_, dict) => dict.0.weight,
            Value::Method(method) => method.value.weight().saturating_add(1),
            _ => 1,
        }
    }

    /// Returns the nesting of lists and dictionaries in this value.
    fn depth(&self) -> usize {
        match self {
            Value::List(items) | Value::Tuple(items) => items.0.depth,
            Value::Dict(dict) | Value::View(_, dict) => dict.0.depth,
            Value::Method(method) => method.value.depth() + 1,
            _ => 0,
        }
    }
}

fn equal_dicts(a: &Dict, b: &Dict) -> bool {
    a.len() == b.len() && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| value.equals(other)))
}

/// The constructors of values that take memory.
impl RenderBudget {
    /// Returns a copy of the text.
    pub fn text(self: &Rc<RenderBudget>, text: &str) -> Result<Value> {
        self.new_text(text).map(Value::Str)
    }

    pub fn new_text(self: &Rc<RenderBudget>, text: &str) -> Result<Text> {
        let lease = self.lease(text.len())?;
        with_lease(text.into(), lease, false)
    }

    /// Returns the text in another case. The result is up to three times as long, and is copied
    /// from a string of up to four times.
    pub fn recased(self: &Rc<RenderBudget>, text: &str, recase: impl FnOnce(&str) -> String) -> Result<Value> {
        let lease = self.lease(text.len().saturating_mul(7))?;
        with_lease(recase(text).into(), lease, false).map(Value::Str)
    }

    pub fn undefined(self: &Rc<RenderBudget>, reason: &str) -> Result<Value> {
        self.new_text(reason).map(Value::Undefined)
    }

    /// Returns `text` as an HTML-safe text.
    pub fn safe_text(self: &Rc<RenderBudget>, text: &Text) -> Result<Value> {
        let mut copy = Builder::new(self);
        copy.push(text.as_str())?;
        copy.into_text(true)
    }

    pub fn pair(self: &Rc<RenderBudget>, first: Value, second: Value) -> Result<Value> {
        let mut pair = Buffer::with_capacity(self, 2)?;
        pair.push(first)?;
        pair.push(second)?;
        pair.into_tuple()
    }

    pub fn dict(self: &Rc<RenderBudget>, entries: Entries) -> Result<Value> {
        self.steps(entries.len())?;
        let depth = nested(entries.iter().flat_map(|(key, value)| [key.value(), value]))?;
        let weight = total_weight(entries.iter().flat_map(|(key, value)| [key.value(), value]));
        Ok(Value::Dict(Dict(Rc::new(DictParts { entries, depth, weight }))))
    }

    pub fn method(self: &Rc<RenderBudget>, value: Value, name: &'static str) -> Result<Value> {
        let lease = self.lease(size_of::<Method>() + 32)?;
        Ok(Value::Method(Rc::new(Method { value, name, _lease: lease })))
    }

    /// Creates a key of a dictionary. A search or an insertion reads all of it.
    pub fn key(&self, value: Value) -> Result<Key> {
        self.steps(value.weight())?;
        Key::new(value)
    }
}

/// Creates a text. `lease` has the bytes of the text, and those of the owner are added.
fn with_lease(text: Box<str>, mut lease: Lease, safe: bool) -> Result<Text> {
    lease.resize(text.len() + 80)?;
    Ok(Text(Rc::new(TextParts { text, safe, _lease: lease })))
}

impl Builder {
    /// Returns the text as a value.
    pub fn into_text(self, safe: bool) -> Result<Value> {
        let (text, lease) = self.finish()?;
        with_lease(text, lease, safe).map(Value::Str)
    }
}

impl Buffer<Value> {
    fn into_items(self) -> Result<Items> {
        self.budget().steps(self.len())?;
        let depth = nested(self.iter())?;
        let weight = total_weight(self.iter());
        Ok(Items(Rc::new(ItemsParts { items: self.with_overhead(112)?, depth, weight })))
    }

    pub fn into_list(self) -> Result<Value> {
        self.into_items().map(Value::List)
    }

    pub fn into_tuple(self) -> Result<Value> {
        self.into_items().map(Value::Tuple)
    }
}

fn total_weight<'a>(items: impl Iterator<Item = &'a Value>) -> usize {
    items.fold(1, |weight: usize, item| weight.saturating_add(item.weight()))
}

fn nested<'a>(items: impl Iterator<Item = &'a Value>) -> Result<usize> {
    let depth = 1 + items.map(Value::depth).max().unwrap_or(0);
    if depth > MAX_VALUE_DEPTH {
        return Err(Failure::limit(format_args!("a value is nested too deep (more than {MAX_VALUE_DEPTH} levels); nest less")));
    }
    Ok(depth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::{BuildHasher, RandomState};

    #[test]
    fn keys_that_differ_have_hashes_that_differ() {
        let budget = Rc::new(RenderBudget::default());
        let tuple = |a: Value, b: Value| budget.pair(a, b).unwrap();
        let one = || Value::Int(1);
        let dict = budget.dict(Entries::new(&budget).unwrap()).unwrap();
        let Value::Dict(dict) = dict else { unreachable!() };
        let mut keys: Vec<Value> = (1..100).map(|step| Value::Range(Range { start: 0, stop: 2 * step, step })).collect();
        keys.extend((0..100).map(|_| Value::View(View::Values, dict.clone())));
        keys.extend((0..100).map(|_| Value::Float(f64::NAN)));
        keys.extend([tuple(one(), tuple(one(), one())), tuple(tuple(one(), one()), one())]);
        let state = RandomState::new();
        let hashes: HashSet<u64> = keys.iter().map(|key| state.hash_one(Key::new(key.clone()).unwrap())).collect();
        assert_eq!(hashes.len(), keys.len());
    }

    #[test]
    fn equal_keys_have_the_same_hash() {
        let budget = Rc::new(RenderBudget::default());
        let range = |stop, step| Value::Range(Range { start: 0, stop, step });
        let equal = [
            [Value::Int(1), Value::Float(1.0)],
            [Value::Int(0), Value::Bool(false)],
            [range(1, 1), range(1, 5)],
            [range(0, 1), Value::Range(Range { start: 7, stop: 7, step: 1 })],
            [budget.undefined("a").unwrap(), budget.undefined("b").unwrap()],
        ];
        let state = RandomState::new();
        for [a, b] in equal.map(|pair| pair.map(|value| Key::new(value).unwrap())) {
            assert!(a == b && state.hash_one(&a) == state.hash_one(&b), "{a:?} {b:?}");
        }
    }
}
