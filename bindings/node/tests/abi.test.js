'use strict';
// abi.js is generated from bindings/abi.json: koffi must lay out its structs as C does.
const { describe, it } = require('node:test');
const assert = require('node:assert/strict');
const fs = require('node:fs');
const path = require('node:path');
const koffi = require('koffi');
require('./support.js');
const abi = require('../abi.js');
const { fill } = require('../runtime.js');

const description = JSON.parse(fs.readFileSync(path.join(__dirname, '../../abi.json')));
const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
// The functions of KV stores and communicators are written in C, so the wrapper has none of their structs.
const isWrapped = ({ name, opaque }) => !opaque && !/^pllm_(kv_(?!event)|communicator)/.test(name);
const records = description.structs.filter(isWrapped).map((struct) => {
  const name = camel(struct.name.slice('pllm_'.length));
  return { ...struct, short: name, type: abi[name[0].toUpperCase() + name.slice(1)] };
});

describe('the generated C API', () => {
  it('has the size and the offsets of each struct', () => {
    for (const { name, size, fields, type } of records) {
      assert.equal(koffi.sizeof(type), size, name);
      const offsets = fields.map((field) => [camel(field.name), koffi.offsetof(type, camel(field.name))]);
      assert.deepEqual(offsets, fields.map((field) => [camel(field.name), field.offset]), name);
    }
  });

  it('reads the default of each option from the library', () => {
    for (const { name, short, fields } of records.filter((struct) => struct.init)) {
      const { required = [] } = abi[short];
      const c = fill(abi[short], Object.fromEntries(required.map((name) => [name, ''])));
      for (const field of fields.filter(({ role, type }) => !type.includes('*') && ['number', 'choice', 'flags'].includes(role))) {
        const rounded = field.type === 'f32' ? Math.fround(field.default) : field.default;
        assert.equal(Number(c[camel(field.name)]), rounded, `${name}.${field.name}`);
      }
    }
  });

  it('reads a reason of a newer library as other', () => {
    const { finishReason, stopReason, stopToken, stopString } = abi.toOutput({ finishReason: 99, stopReason: 99, stopToken: 7 });
    assert.deepEqual([finishReason, stopReason, stopToken, stopString], ['other', 'other', null, null]);
  });

  it('ships each module of the wrapper', () => {
    const { files } = require('../package.json');
    const modules = fs.readdirSync(path.join(__dirname, '..')).filter((file) => /\.(js|d\.ts)$/.test(file));
    assert.deepEqual(files.filter((file) => file !== 'README.md').sort(), modules.sort());
  });
});
