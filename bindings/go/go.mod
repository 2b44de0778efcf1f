module github.com/libpagedllm/libpagedllm/bindings/go

go 1.23
