#include "text.hpp"

#include "../shared/utf8.hpp"
#include "chat_prompt.hpp"

namespace server {

struct TokenizeRequest {
    std::string model;
    std::optional<std::string> prompt;  // without it, the messages are rendered
    std::optional<bool> add_special_tokens;
    bool return_token_strs = false;
};

struct DetokenizeRequest {
    std::string model;
    std::vector<uint32_t> tokens;
    bool skip_special_tokens = false;
};

std::string answer_tokenize(const JsonValue &body, const FindModel &find_model) {
    static const Fields<TokenizeRequest> fields = {
        {"model", read_field<&TokenizeRequest::model, TokenizeRequest>},
        {"prompt", read_field<&TokenizeRequest::prompt, TokenizeRequest>},
        {"add_special_tokens", read_field<&TokenizeRequest::add_special_tokens, TokenizeRequest>},
        {"return_token_strs", read_field<&TokenizeRequest::return_token_strs, TokenizeRequest>},
    };
    TokenizeRequest request;
    ChatPrompt chat;
    read_object(body, "", Part{request, fields}, Part{chat, chat_prompt_fields});
    Model &model = find_model(request.model);
    if (request.prompt.has_value() == chat.messages.has_value()) {
        throw bad_request("prompt", "the request needs either prompt or messages; send one of them");
    }
    const std::string text = request.prompt ? *request.prompt : chat.render(model);
    const bool add_special = request.add_special_tokens.value_or(request.prompt.has_value());  // a template writes them itself
    const std::vector<uint32_t> tokens = value_of(model.engine.tokenize(text, add_special));
    std::string answer;
    JsonWriter json(answer);
    json.begin_object().member("count", static_cast<uint64_t>(tokens.size())).member("max_model_len", model.max_model_len);
    json.key("tokens").begin_array();
    for (const uint32_t token : tokens) json.value(token);
    json.end_array();
    if (request.return_token_strs) {
        json.key("token_strs").begin_array();
        for (const uint32_t token : tokens) json.value(utf8::printable(value_of(model.engine.token_bytes(token))));
        json.end_array();
    }
    json.end_object();
    return answer;
}

std::string answer_detokenize(const JsonValue &body, const FindModel &find_model) {
    static const Fields<DetokenizeRequest> fields = {
        {"model", read_field<&DetokenizeRequest::model, DetokenizeRequest>},
        {"tokens", read_field<&DetokenizeRequest::tokens, DetokenizeRequest>},
        {"skip_special_tokens", read_field<&DetokenizeRequest::skip_special_tokens, DetokenizeRequest>},
    };
    DetokenizeRequest request;
    read_object(body, "", Part{request, fields});
    Model &model = find_model(request.model);
    std::string answer;
    const std::string text = value_of(model.engine.detokenize(request.tokens, request.skip_special_tokens));
    JsonWriter(answer).begin_object().member("prompt", text).end_object();
    return answer;
}

}  // namespace server
