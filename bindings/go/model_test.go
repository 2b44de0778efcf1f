package pagedllm_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// modelOf writes a model directory with the shape of the bundled model, the given number of layers,
// and weights of which each byte is fill.
func modelOf(t *testing.T, layers int, fill byte) string {
	t.Helper()
	directory := t.TempDir()
	config := map[string]any{}
	if err := json.Unmarshal(read(t, "config.json"), &config); err != nil {
		t.Fatal(err)
	}
	config["num_hidden_layers"] = layers
	write(t, directory, "config.json", asJSON(t, config))
	write(t, directory, "tokenizer.json", read(t, "tokenizer.json"))
	write(t, directory, "tokenizer_config.json", read(t, "tokenizer_config.json"))

	weights := read(t, "model.safetensors")
	headerLen := binary.LittleEndian.Uint64(weights)
	header := map[string]*tensor{}
	if err := json.Unmarshal(weights[8:8+headerLen], &header); err != nil {
		t.Fatal(err)
	}
	delete(header, "__metadata__")
	ours := map[string]tensor{}
	end := 0
	add := func(name string, like *tensor) {
		size := like.Offsets[1] - like.Offsets[0]
		ours[name] = tensor{like.Type, like.Shape, [2]int{end, end + size}}
		end += size
	}
	for name, tensor := range header {
		var layer int
		var part string
		if n, _ := fmt.Sscanf(name, "model.layers.%d.%s", &layer, &part); n < 2 {
			add(name, tensor)
		} else if layer == 0 {
			for layer := range layers {
				add(fmt.Sprintf("model.layers.%d.%s", layer, part), tensor)
			}
		}
	}
	text := asJSON(t, ours)
	var file bytes.Buffer
	binary.Write(&file, binary.LittleEndian, uint64(len(text)))
	file.Write(text)
	size := int64(file.Len() + end)
	if fill != 0 {
		file.Write(bytes.Repeat([]byte{fill}, end))
	}
	write(t, directory, "model.safetensors", file.Bytes())
	// The file is sparse.
	if err := os.Truncate(filepath.Join(directory, "model.safetensors"), size); err != nil {
		t.Fatal(err)
	}
	return directory
}

type tensor struct {
	Type    string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(model, name))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func write(t *testing.T, directory, name string, content []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(directory, name), content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func asJSON(t *testing.T, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
