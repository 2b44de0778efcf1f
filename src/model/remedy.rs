//! What a host can do if a model directory has its weights in another form.

use std::path::Path;

/// Maximum number of files that are looked at.
const MAX_FILES: usize = 4096;

/// Returns the remedy for a directory without the wanted files, by the files that it has.
pub fn for_files_of(dir: &Path) -> &'static str {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().take(MAX_FILES);
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let has = |wanted: &dyn Fn(&str) -> bool| names.iter().any(|name| wanted(name));
    if has(&|name| name.starts_with("adapter_model.") || name == "adapter_config.json") {
        return "the directory has only a LoRA adapter; merge it into its base model with merge_and_unload of peft, \
                and save the result with save_pretrained";
    }
    if has(&|name| name.ends_with(".gguf")) {
        return "the directory has a GGUF file; set model_path to the file";
    }
    if has(&|name| name.starts_with("pytorch_model") && (name.ends_with(".bin") || name.ends_with(".bin.index.json"))) {
        return "the directory has only pytorch_model.bin; load it with from_pretrained of transformers, \
                and write model.safetensors with save_pretrained";
    }
    if has(&|name| name == "params.json" || name.starts_with("consolidated.")) {
        return "the directory has the layout of the model's authors (params.json); \
                use the model in the layout of Hugging Face, with config.json and model.safetensors";
    }
    "model_path must contain config.json, model.safetensors and tokenizer.json"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_other_form_has_its_remedy() {
        let dir = std::env::temp_dir().join(format!("pagedllm-remedy-{}", std::process::id()));
        for (files, remedy) in [
            (&["adapter_config.json", "adapter_model.safetensors"][..], "merge_and_unload"),
            (&["model-Q4_K_M.gguf"], "GGUF"),
            (&["config.json", "pytorch_model-00001-of-00002.bin"], "save_pretrained"),
            (&["params.json", "consolidated.00.pth"], "params.json"),
            (&["notes.txt"], "model_path must contain"),
            (&[], "model_path must contain"),
        ] {
            std::fs::create_dir_all(&dir).unwrap();
            files.iter().for_each(|file| std::fs::write(dir.join(file), "").unwrap());
            assert!(for_files_of(&dir).contains(remedy), "{files:?}: {}", for_files_of(&dir));
            std::fs::remove_dir_all(&dir).unwrap();
        }
        assert!(for_files_of(&dir).contains("model_path must contain"), "the directory does not exist");
    }
}
