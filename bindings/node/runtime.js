'use strict';
// What abi.js needs: the library, its errors, and the conversions that the fields of the C API name.
const fs = require('node:fs');
const path = require('node:path');
const util = require('node:util');
const koffi = loadKoffi();

function loadKoffi() {
  try {
    return require('koffi');
  } catch (error) {
    if (error.code !== 'MODULE_NOT_FOUND') throw error;
    throw new Error(`koffi is not installed; run 'npm ci' in ${__dirname}`, { cause: error });
  }
}

class PagedllmError extends Error {
  constructor(code, message, { promptTokens = null, maxModelLen = null, isTemporary = false } = {}) {
    super(message);
    this.name = 'PagedllmError';
    this.code = code;
    this.promptTokens = promptTokens;
    this.maxModelLen = maxModelLen;
    this.isTemporary = isTemporary;
  }
}

function loadLibrary(version) {
  const places = ['libpagedllm.so', '../../target/release/libpagedllm.so', '../../../lib/libpagedllm.so.1'];
  const files = places.map((place) => path.join(__dirname, place));
  const file = process.env.PAGEDLLM_LIBRARY || files.find((file) => fs.existsSync(file)) || 'libpagedllm.so.1';
  let library;
  try {
    library = koffi.load(file);
  } catch (error) {
    const remedy = 'install the package for this machine, or set PAGEDLLM_LIBRARY to the path of the library';
    throw new Error(`${file} ${machineProblem(file) ?? `is not loaded: ${error.message}`}; ${remedy}`, { cause: error });
  }
  const abi = library.func('pllm_abi_version', 'uint32_t', [])();
  if (abi !== version) {
    throw new Error(`${file} has ABI version ${abi} (this module: ${version}); use the module and the library of one release`);
  }
  return { func: (...declaration) => declare(library, file, declaration) };
}

function declare(library, file, declaration) {
  try {
    return library.func(...declaration);
  } catch (error) {
    const version = library.func('pllm_version', 'const char *', [])();
    const [name] = declaration;
    throw new Error(`${file} is version ${version}, which has no ${name}; use the module and the library of one release`, { cause: error });
  }
}

// Returns the problem of a file for another machine. The message of the loader can be wrong then.
function machineProblem(file) {
  const header = (path) => {
    const bytes = Buffer.alloc(20), descriptor = fs.openSync(path);
    fs.readSync(descriptor, bytes);
    fs.closeSync(descriptor);
    return bytes;
  };
  const machine = (bytes) => ({ 3: 'x86', 40: 'ARM', 62: 'x86-64', 183: 'AArch64' })[bytes[18]] ?? `ELF machine ${bytes[18]}`;
  let found, own;
  try {
    found = header(file);
    own = header('/proc/self/exe');
  } catch {
    return null;
  }
  if (found.toString('latin1', 0, 4) !== '\x7fELF') return 'is no shared library';
  return found[18] === own[18] ? null : `is for another machine (${machine(found)}, this process: ${machine(own)})`;
}

// Declares a struct of pagedllm.h, whose fields must have the layout of C.
function struct(name, size, fields) {
  const type = koffi.struct(fields);
  if (koffi.sizeof(type) !== size) throw new Error(`internal error: ${name} has ${koffi.sizeof(type)} bytes, not ${size}`);
  return type;
}

// ---- checks of arguments ------------------------------------------------------------------------

const unsigned = (name, number, bits) => integer(name, number, 0n, 1n << BigInt(bits));
const signed = (name, number, bits) => integer(name, number, -1n << BigInt(bits - 1), 1n << BigInt(bits - 1));

// Checks that a number is an integer from low up to, but not including, end. koffi would truncate it.
function integer(name, number, low, end) {
  const whole = typeof number === 'bigint' || Number.isInteger(number);
  if (!whole && typeof number !== 'number') throw new TypeError(`${name} is ${util.inspect(number)}; it must be a number or a bigint`);
  if (!whole || BigInt(number) < low || BigInt(number) >= end) {
    const message = `${name} is ${number}; it must be an integer from ${low} to ${end - 1n}`;
    throw new PagedllmError('PLLM_E_INVALID_ARGUMENT', message);
  }
  return number;
}

function real(name, number) {
  if (typeof number !== 'number') throw new TypeError(`${name} is ${util.inspect(number)}; it must be a number`);
  return number;
}

// Texts, states and token ids are copied, because a thread of the pool reads them. An uncounted
// zero follows them, because koffi passes an empty buffer as NULL.
function utf8(name, text) {
  if (typeof text === 'string') return Buffer.from(`${text}\0`);
  if (text instanceof Uint8Array) return copied(text);
  throw new TypeError(`${name} is ${util.inspect(text)}; it must be a string, or a Uint8Array of UTF-8`);
}

function bytes(name, given) {
  if (given instanceof Uint8Array) return copied(given);
  throw new TypeError(`${name} is ${util.inspect(given)}; it must be a Uint8Array`);
}

const copied = (given) => Buffer.concat([given, Buffer.alloc(1)]);

function tokenIds(name, tokens) {
  if (!Array.isArray(tokens) && !(tokens instanceof Uint32Array)) {
    throw new TypeError(`${name} is ${util.inspect(tokens)}; it must be an array or a Uint32Array`);
  }
  return Uint32Array.from([...tokens, 0], (token) => unsigned(`a token id of ${name}`, token, 32));
}

const lengthOf = (copied) => copied.length - 1;

const flag = (flags, bit, on) => (on === undefined ? flags : on ? flags | bit : flags & ~bit);

// ---- options ------------------------------------------------------------------------------------

// Returns the C struct with the given options, and the library's defaults for the others. `options`
// is a table of abi.js, with a setter for each option.
function fill(options, given) {
  const c = { structSize: koffi.sizeof(options.type) };
  options.init(c, c.structSize);
  for (const [name, set] of Object.entries(options.set)) {
    if (given[name] !== undefined || options.required?.includes(name)) set(c, name, given[name]);
  }
  for (const [name, value] of Object.entries(given)) {
    if (value !== undefined && !Object.hasOwn(options.set, name)) throw new TypeError(`unknown option '${name}'`);
  }
  return c;
}

// Returns the options of a table, and the others.
function split(options, given) {
  const entries = Object.entries(given);
  const known = ([name]) => Object.hasOwn(options.set, name);
  return [Object.fromEntries(entries.filter(known)), Object.fromEntries(entries.filter((entry) => !known(entry)))];
}

// Setters write a value to the fields of the C struct `c`.
const set = {
  u32: (c, name, value) => { c[name] = unsigned(name, value, 32); },
  u64: (c, name, value) => { c[name] = unsigned(name, value, 64); },
  i32: (c, name, value) => { c[name] = signed(name, value, 32); },
  i64: (c, name, value) => { c[name] = signed(name, value, 64); },
  f32: (c, name, value) => { c[name] = real(name, value); },
  f64: (c, name, value) => { c[name] = real(name, value); },

  // Rounds up, because remaining times have fractions. In C, 0 means no deadline.
  deadline(c, name, ms) {
    if (!(real(name, ms) > 0)) {
      const message = `${name} is ${ms}; pass the remaining milliseconds, or leave it out for no deadline`;
      throw new PagedllmError('PLLM_E_INVALID_ARGUMENT', message);
    }
    set.i64(c, name, Math.ceil(ms));
  },

  choice: (names) => (c, name, value) => {
    if (typeof value !== 'string' || !Object.hasOwn(names, value)) {
      throw new TypeError(`${name} is ${util.inspect(value)}; it must be one of ${Object.keys(names).join(', ')}`);
    }
    c[name] = names[value];
  },
  flag: (field, bit) => (c, _name, on) => { c[field] = flag(c[field], bit, on); },
  notFlag: (field, bit) => (c, _name, on) => { c[field] = flag(c[field], bit, !on); },
  // The option itself, and the flag with which C uses it.
  withFlag: (setter, field, bit) => (c, name, value) => {
    setter(c, name, value);
    c[field] |= bit;
  },

  text: (c, name, value) => setCopied(c, name, utf8(name, value)),
  tokens: (c, name, value) => setCopied(c, name, tokenIds(name, value)),

  // An uncounted element follows the texts: koffi passes an empty array as NULL, which means no list.
  texts: (lens, count) => (c, name, value) => {
    const copied = [value].flat().map((text) => utf8(name, text));
    c[name] = [...copied, null];
    c[lens] = copied.map(lengthOf);
    c[count] = copied.length;
  },
  tokenLists(c, name, value) {
    c[name] = value.map((list) => tokenIds(name, list)).map((tokens) => ({ tokens, tokensLen: lengthOf(tokens) }));
    c[`${name}Len`] = c[name].length;
  },
  logitBiases(c, name, value) {
    c[name] = Object.entries(value).map(([token, bias]) => (
      { token: unsigned(`a token id of ${name}`, Number(token), 32), bias: real('bias', bias) }));
    c[`${name}Len`] = c[name].length;
  },
  record: (options) => (c, name, value) => { c[name] = fill(options, value); },

  // The option has one property, whose name is the kind. `setChoices` sets the field of the choices.
  grammar: (kinds, setChoices) => (c, name, value) => {
    const [[kind, rule] = [], ...more] = Object.entries(value);
    const known = Object.keys(kinds).filter((kind) => kind !== 'none');
    if (more.length || !known.includes(kind)) {
      throw new TypeError(`${name} is ${util.inspect(value)}; it must have exactly one of the properties ${known.join(', ')}`);
    }
    c.grammarKind = kinds[kind];
    if (kind === 'choice') setChoices(c, 'choices', rule);
    else if (kind === 'jsonSchema' && ['object', 'boolean'].includes(typeof rule) && !(rule instanceof Uint8Array)) {
      set.text(c, name, JSON.stringify(rule));
    } else if (kind !== 'jsonObject') set.text(c, name, rule);
  },
};

function setCopied(c, name, copied) {
  c[name] = copied;
  c[`${name}Len`] = lengthOf(copied);
}

// ---- results ------------------------------------------------------------------------------------

const text = (address, length) => (address ? koffi.decode.string(address, length) : '');
const array = (address, type, length) => (address ? Array.from(koffi.decode(address, type, length)) : []);
const hash = (address) => (address ? Buffer.from(koffi.view(address, 32)).toString('hex') : null);
const arrayOrNull = (address, type, length) => (address ? array(address, type, length) : null);
const nameOf = (names, value) => Object.keys(names).find((name) => names[name] === value);
const reasonOf = (names, value) => (value === names.none ? null : nameOf(names, value) ?? 'other');

// Returns the alternatives, the same number for each of the tokens.
function alternatives(address, type, length, tokens) {
  if (!address) return null;
  const each = length / tokens, all = koffi.decode(address, type, length);
  return Array.from({ length: tokens }, (_, i) => all.slice(i * each, (i + 1) * each));
}

module.exports = {
  PagedllmError, alternatives, array, arrayOrNull, bytes, fill, flag, hash, koffi, lengthOf, loadLibrary, nameOf, reasonOf, set, split,
  struct, text, tokenIds, unsigned, utf8,
};
