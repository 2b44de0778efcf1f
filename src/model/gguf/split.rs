//! Names of the files of a model that is split: `NAME-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Returns the end of the name of a file. `index` counts from 0.
fn suffix(index: usize, count: usize) -> String {
    format!("-{:05}-of-{count:05}.gguf", index + 1)
}

/// Returns the path of a file of the model whose first file is `first`.
pub fn path(first: &Path, index: usize, count: usize) -> Result<PathBuf> {
    let expected = suffix(0, count);
    let base = first.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(&expected));
    match base {
        Some(base) => Ok(first.with_file_name(format!("{base}{}", suffix(index, count)))),
        None => Err(Error::model(format!("the model has {count} files; the name of the first must end with {expected}"))),
    }
}

/// Returns true if the paths, in ascending order, are all files of one model.
pub fn is_one_model(paths: &[PathBuf]) -> bool {
    let count = paths.len();
    paths.iter().enumerate().all(|(index, other)| path(&paths[0], index, count).is_ok_and(|path| path == *other))
}
